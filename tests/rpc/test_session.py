"""The two ends of a session stream: the outbox that never waits, and silence as an error."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pdserve.core.errors import NodeLostError
from pdserve.rpc.session import CHANNEL_OPTIONS, HEARTBEAT_S, Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc

SILENCE_S = 0.25


class Word(str):
    """A message that is easy to read."""

    def ByteSize(self) -> int:
        return len(self)


async def collect(messages: AsyncIterator[str], into: list[str] | None = None) -> list[str]:
    """All messages; ``into`` has those before an error too."""
    heard = [] if into is None else into
    async for message in messages:
        heard.append(message)
    return heard


# ---- outbox ---------------------------------------------------------------------------------


async def test_messages_are_sent_in_the_order_in_which_they_were_put():
    outbox: Outbox[Word] = Outbox()
    for message in ("a", "b", "c"):
        outbox.put(Word(message))
    outbox.close()
    assert await collect(aiter(outbox)) == ["a", "b", "c"]


async def test_what_comes_while_somebody_waits_is_sent_at_once():
    outbox: Outbox[Word] = Outbox()
    waiting = asyncio.create_task(anext(aiter(outbox)))
    await asyncio.sleep(0)
    outbox.put(Word("a"))
    assert await asyncio.wait_for(waiting, 5) == "a"


async def test_a_closed_outbox_takes_nothing_more_and_can_be_closed_again():
    outbox: Outbox[Word] = Outbox()
    outbox.put(Word("a"))
    outbox.close()
    outbox.put(Word("b"))
    outbox.close()
    assert await collect(aiter(outbox)) == ["a"]


async def test_an_idle_outbox_says_that_it_is_alive_and_loses_nothing_by_it():
    outbox: Outbox[Word] = Outbox(idle_message=Word("alive"))
    messages = aiter(outbox)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    assert await anext(messages) == "alive"
    assert HEARTBEAT_S * 0.9 <= loop.time() - begun_s < HEARTBEAT_S + 5
    outbox.put(Word("a"))
    outbox.close()
    assert await collect(messages) == ["a"]


async def test_an_outbox_without_an_idle_message_keeps_quiet():
    outbox: Outbox[Word] = Outbox()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(HEARTBEAT_S + 0.2):
            await anext(aiter(outbox))


async def test_more_than_may_wait_is_dropped_and_named():
    outbox: Outbox[Word] = Outbox(max_bytes=10)
    for message in ("abcd", "efgh", "ij"):
        outbox.put(Word(message))
    outbox.check("decode-0")
    outbox.put(Word("k"))
    with pytest.raises(NodeLostError, match="decode-0: it does not read: 11 bytes of messages"):
        outbox.check("decode-0")
    outbox.put(Word("l"))
    assert await collect(aiter(outbox)) == []


async def test_what_was_taken_waits_no_more_and_one_message_may_be_of_any_size():
    outbox: Outbox[Word] = Outbox(max_bytes=3)
    messages = aiter(outbox)
    for message in ("abcdef", "ghi", "klmnop"):
        outbox.put(Word(message))
        assert await anext(messages) == message
    outbox.check("decode-0")


# ---- listening ------------------------------------------------------------------------------


async def test_all_messages_are_heard_until_the_other_side_ends_the_stream():
    outbox: Outbox[Word] = Outbox()
    outbox.put(Word("a"))
    outbox.put(Word("b"))
    outbox.close()
    assert await collect(listen(aiter(outbox), peer="decode-0")) == ["a", "b"]


async def test_silence_means_that_the_other_side_is_lost():
    outbox: Outbox[Word] = Outbox()
    outbox.put(Word("a"))
    heard: list[str] = []
    with pytest.raises(NodeLostError, match=r"decode-0: nothing heard for 0\.25 s"):
        await collect(listen(aiter(outbox), peer="decode-0", silence_s=SILENCE_S), heard)
    assert heard == ["a"]


async def test_each_message_starts_the_silence_anew():
    outbox: Outbox[Word] = Outbox()
    loop = asyncio.get_running_loop()
    for i in range(4):
        loop.call_later(SILENCE_S * 0.6 * (i + 1), outbox.put, Word("a"))
    loop.call_later(SILENCE_S * 0.6 * 5, outbox.close)
    assert await collect(listen(aiter(outbox), peer="p", silence_s=SILENCE_S)) == ["a"] * 4


async def test_the_time_that_the_listener_takes_is_not_silence():
    outbox: Outbox[Word] = Outbox()
    outbox.put(Word("a"))
    messages = listen(aiter(outbox), peer="p", silence_s=SILENCE_S)
    await anext(messages)
    await asyncio.sleep(SILENCE_S * 2)
    outbox.put(Word("b"))
    assert await anext(messages) == "b"


async def test_a_listener_that_is_cancelled_is_not_a_lost_node():
    outbox: Outbox[Word] = Outbox()
    task = asyncio.create_task(collect(listen(aiter(outbox), peer="p")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# ---- over gRPC ------------------------------------------------------------------------------


class _Echo(session_pb2_grpc.DecodeNodeServicer):
    """Answers two messages, then breaks the session."""

    async def Session(
        self,
        request_iterator: AsyncIterator[session_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[session_pb2.RouterMessage, session_pb2.DecodeMessage],
    ) -> AsyncIterator[session_pb2.DecodeMessage]:
        count = 0
        async for _ in listen(request_iterator, peer="router"):
            yield session_pb2.DecodeMessage(status=session_pb2.NodeStatus(reason=str(count)))
            count += 1
            if count == 2:
                await context.abort(grpc.StatusCode.INTERNAL, "out of order")


async def reasons(messages: AsyncIterator[session_pb2.DecodeMessage]) -> AsyncIterator[str]:
    async for message in messages:
        yield message.status.reason


async def test_a_broken_stream_is_a_lost_node_with_the_reason():
    server = grpc.aio.server()
    session_pb2_grpc.add_DecodeNodeServicer_to_server(_Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    outbox: Outbox[session_pb2.RouterMessage] = Outbox()
    heard: list[str] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        call = session_pb2_grpc.DecodeNodeStub(channel).Session(aiter(outbox))
        for _ in range(2):
            outbox.put(session_pb2.RouterMessage(heartbeat=session_pb2.Heartbeat()))
        with pytest.raises(NodeLostError, match="decode-0: INTERNAL: out of order"):
            await collect(reasons(listen(aiter(call), peer="decode-0")), heard)
    await server.stop(None)
    assert heard == ["0", "1"]


async def test_nobody_at_the_address_is_a_lost_node():
    async with grpc.aio.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS) as channel:
        outbox: Outbox[session_pb2.RouterMessage] = Outbox()
        call = session_pb2_grpc.DecodeNodeStub(channel).Session(aiter(outbox))
        with pytest.raises(NodeLostError, match="decode-0: UNAVAILABLE"):
            await anext(listen(aiter(call), peer="decode-0"))
