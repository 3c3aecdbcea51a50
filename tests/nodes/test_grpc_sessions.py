"""Sessions over real gRPC: hello, status, silence, malformed messages, losses."""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from pdserve.rpc import convert
from pdserve.rpc.session import MAX_OUTPUT_BYTES, PROTOCOL_VERSION, Outbox
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from prefill_node.node import PrefillNode
from tests.nodes.site import HEARTBEAT, HELLO, PATIENCE_S, RouterClient, Site
from tests.nodes.specs import MODEL, Asked, ask
from tests.prompts import VOCAB_SIZE

WRONG_HELLOS = [
    (
        session_pb2.RouterHello(protocol_version=0, model_fingerprint=MODEL.fingerprint),
        ["protocol_version", str(PROTOCOL_VERSION), "0"],
    ),
    (
        session_pb2.RouterHello(protocol_version=PROTOCOL_VERSION, model_fingerprint="beef"),
        ["model_fingerprint", repr(MODEL.fingerprint), "'beef'"],
    ),
]


async def refusal(call) -> str:
    """Why the node refuses the call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return raised.value.details() or ""


async def once(message):
    yield message


async def take(call, count):
    for _ in range(count):
        yield await call.read()


async def nothing():
    return
    yield


# ---- routers with a decode node -----------------------------------------------------------------


@pytest.mark.parametrize(("hello", "words"), WRONG_HELLOS)
async def test_a_router_that_does_not_fit_is_refused_by_field_with_both_values(hello, words):
    async with Site() as site:
        await site.start_decode()
        async with grpc.aio.insecure_channel(site.decode.address.address) as channel:
            stub = session_pb2_grpc.DecodeNodeStub(channel)
            reason = await refusal(stub.Session(once(session_pb2.RouterMessage(hello=hello))))
        assert all(word in reason for word in words)


@pytest.mark.parametrize("messages", [nothing, lambda: once(session_pb2.RouterMessage())])
async def test_a_session_begins_with_a_hello(messages):
    async with Site() as site:
        await site.start_decode()
        async with grpc.aio.insecure_channel(site.decode.address.address) as channel:
            stub = session_pb2_grpc.DecodeNodeStub(channel)
            assert await refusal(stub.Session(messages()))


async def test_idle_sessions_live_by_heartbeats_and_a_router_hears_every_second():
    async with Site(silence_s=1.5) as site:
        router = await site.start_all("p0")
        assert router.welcome is not None
        assert router.welcome.node == "decode-0"
        assert router.welcome.incarnation == site.decode.address.incarnation
        assert router.welcome.max_model_len == 64 * 4
        assert [rank.pid for rank in router.welcome.ranks] == [1000]
        num_statuses, began_s = len(router.statuses), time.monotonic()
        await router.until(lambda: len(router.statuses) >= num_statuses + 3)
        assert 1.9 < time.monotonic() - began_s < 6
        for status in router.statuses[num_statuses:]:
            assert status.ready
            assert status.connected_prefill_nodes == ["p0"]
        assert (status.total_blocks, status.free_blocks, status.block_size) == (64, 64, 4)


async def test_an_abort_over_the_wire_frees_everything_on_both_nodes():
    async with Site(longest_s=0.1) as site:  # all tokens would take longer than it waits
        router = await site.start_all("p0")
        remote = ask(site.model, 1, prompt_len=90, max_tokens=300, prefill_nodes=("p0",))
        local = ask(site.model, 2, prompt_len=20, max_tokens=300)
        router.submit(remote)
        router.submit(local)
        await router.until_begun(local)
        router.abort(remote)
        router.abort(local)
        await site.until_free()
        assert site.decode.node.num_requests == 0


async def test_when_a_router_is_gone_everything_that_it_asked_for_ends():
    async with Site(longest_s=0.1) as site:  # all tokens would take longer than it waits
        router = await site.start_all("p0")
        other = await site.start_router()
        for i in range(4):
            router.submit(ask(site.model, i, prompt_len=30, max_tokens=300, prefill_nodes=("p0",)))
        await router.until(lambda: site.decode.node.num_requests == 4)
        kept = ask(site.model, 5, prompt_len=30, max_tokens=8, prefill_nodes=("p0",))
        other.submit(kept)
        await router.close()
        await other.until_over(kept)
        assert kept.got == kept.expected
        await site.until_free()


async def test_a_router_that_says_nothing_is_left_after_a_while():
    async with Site(silence_s=1.3) as site:
        await site.start_decode()
        alive = await site.start_router()
        silent = RouterClient(site.decode.address.address, has_heartbeat=False)
        await silent.until(lambda: silent.welcome is not None)
        silent.submit(ask(site.model, 1, prompt_len=5, max_tokens=250))
        began_s = time.monotonic()
        await silent.until_lost()
        assert 1.0 < time.monotonic() - began_s < 5
        await site.until_free()
        asked = ask(site.model, 2, prompt_len=5, max_tokens=3)
        alive.submit(asked)
        await alive.until_over(asked)
        await silent.close()


def huge_status() -> session_pb2.NodeStatus:
    """More than gRPC takes in of a stream that nobody reads."""
    return session_pb2.NodeStatus(reason="x" * (2 << 20))


@asynccontextmanager
async def deaf_router(
    site: Site, asked: Asked, *, has_heartbeat: bool
) -> AsyncIterator[AsyncIterable[session_pb2.DecodeMessage]]:
    """A router that submits a request and reads nothing of its session, which it yields."""
    outbox: Outbox[session_pb2.RouterMessage] = Outbox(HEARTBEAT if has_heartbeat else None)
    outbox.put(session_pb2.RouterMessage(hello=HELLO))
    outbox.put(session_pb2.RouterMessage(submit=convert.request_to_proto(asked.request)))
    async with grpc.aio.insecure_channel(site.decode.address.address) as channel:
        call = session_pb2_grpc.DecodeNodeStub(channel).Session(aiter(outbox))
        async with asyncio.timeout(PATIENCE_S):
            while not site.decode.node.num_requests:
                await site.post.pause(0.01)
        yield call
        call.cancel()


@pytest.mark.parametrize("between_s", [0.0, 0.002])  # before its stream is held up, and after
async def test_a_router_that_does_not_read_is_left_by_name_with_all_that_it_owned(
    caplog: pytest.LogCaptureFixture, between_s: float
):
    caplog.set_level(logging.INFO)
    async with Site(longest_s=0.1) as site:
        await site.start_decode()
        asked = ask(site.model, 1, prompt_len=5, max_tokens=300)
        async with deaf_router(site, asked, has_heartbeat=True) as call:
            (session,) = site.decode.node._sessions
            for _ in range(MAX_OUTPUT_BYTES // (2 << 20) + 9):
                session.outbox.put(session_pb2.DecodeMessage(status=huge_status()))
                await asyncio.sleep(between_s)
            await site.until_free()
            assert site.decode.node.num_requests == 0
            assert "router: it does not read: " in caplog.text
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
        router = await site.start_router()
        other = ask(site.model, 2, prompt_len=5, max_tokens=3)
        router.submit(other)
        await router.until_over(other)


async def test_what_a_silent_router_owned_ends_although_it_reads_nothing():
    async with Site(longest_s=0.1, silence_s=1.3) as site:
        await site.start_decode()
        asked = ask(site.model, 1, prompt_len=5, max_tokens=300)
        async with deaf_router(site, asked, has_heartbeat=False):
            (session,) = site.decode.node._sessions
            session.outbox.put(session_pb2.DecodeMessage(status=huge_status()))
            await site.until_free()
            assert site.decode.node.num_requests == 0


def changed(**fields) -> session_pb2.NodeRequest:
    """A request that no router should send."""
    message = convert.request_to_proto(ask(Site().model, 1, prompt_len=5, max_tokens=3).request)
    for name, value in fields.items():
        target = message.sampling if name in _SAMPLING_FIELDS else message
        if isinstance(value, list):
            target.ClearField(name)
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


_SAMPLING_FIELDS = session_pb2.NodeSampling.DESCRIPTOR.fields_by_name

MALFORMED = [
    ("token_ids", changed(token_ids=[])),
    ("token_ids", changed(token_ids=[1, VOCAB_SIZE, 2, 3, 4])),
    ("token_ids", changed(token_ids=[1] * 8)),  # the three tokens that it asks for are there
    ("prompt", changed(token_ids=[1] * 300, prompt_len=300)),
    ("prompt_len", changed(prompt_len=0)),
    ("prompt_len", changed(prompt_len=6)),
    ("choices", changed(choices=[])),
    ("choices", changed(choices=[0, 1, 0])),
    ("n", changed(choices=list(range(100)))),
    ("max_tokens", changed(max_tokens=0)),
    ("seed", changed(seed=1 << 63)),
    ("top_k", changed(top_k=0)),
    ("logprobs", changed(logprobs=VOCAB_SIZE + 1)),
    ("prompt_logprobs", changed(prompt_logprobs=21)),
    ("temperature", changed(temperature=float("nan"))),
    ("stop_token_ids", changed(stop_token_ids=[VOCAB_SIZE])),
    ("logit_bias", changed(logit_bias_ids=[1, 2], logit_bias_values=[1.0])),
    ("logit_bias", changed(logit_bias_ids=[VOCAB_SIZE], logit_bias_values=[1.0])),
    ("logit_bias", changed(logit_bias_ids=[1], logit_bias_values=[float("inf")])),
]


@pytest.mark.parametrize(("field", "message"), MALFORMED)
async def test_a_request_that_no_rank_could_work_with_is_refused_by_field(field, message):
    async with Site() as site:
        await site.start_decode()
        router = await site.start_router()
        wrong = ask(site.model, 1, prompt_len=5, max_tokens=3)
        router.hearing.add(wrong)
        router.outbox.put(session_pb2.RouterMessage(submit=message))
        await router.until_over(wrong)
        assert wrong.failure in ("invalid_request_error", "never_fits_error")
        assert wrong.failure_message.startswith(f"{field}: ")
        assert not wrong.retryable
        right = ask(site.model, 2, prompt_len=5, max_tokens=3)
        router.submit(right)
        await router.until_over(right)


async def test_strange_messages_of_a_router_change_nothing():
    async with Site() as site:
        await site.start_decode()
        router = await site.start_router()
        unknown = session_pb2.RequestKey(request_id="never heard of", attempt=3)
        for message in (
            session_pb2.RouterMessage(),
            session_pb2.RouterMessage(hello=HELLO),
            session_pb2.RouterMessage(abort=unknown),
        ):
            router.outbox.put(message)
        asked = ask(site.model, 2, prompt_len=5, max_tokens=3)
        router.submit(asked)
        router.submit(asked)  # a repeated message
        await router.until_over(asked)
        await site.until_free()


async def test_a_request_of_another_router_can_neither_be_taken_nor_aborted():
    async with Site(longest_s=0.01) as site:
        await site.start_decode()
        router, other = await site.start_router(), await site.start_router()
        asked = ask(site.model, 2, prompt_len=5, max_tokens=20)
        router.submit(asked)
        await router.until_begun(asked)
        stolen = ask(site.model, 2, prompt_len=5, max_tokens=20)
        other.submit(stolen)
        await other.until_over(stolen)
        assert stolen.failure == "invalid_request_error"
        other.abort(stolen)
        await router.until_over(asked)
        assert asked.got == asked.expected


# ---- decode nodes and watching routers with a prefill node --------------------------------------


@pytest.mark.parametrize("messages", [nothing, lambda: once(session_pb2.PrefillRequest())])
async def test_a_prefill_session_begins_with_a_hello(messages):
    async with Site() as site:
        address = await site.start_prefill("p0")
        async with grpc.aio.insecure_channel(address.address) as channel:
            stub = session_pb2_grpc.PrefillNodeStub(channel)
            assert await refusal(stub.Session(messages()))


async def test_a_watching_router_hears_how_a_prefill_node_is():
    async with Site() as site:
        address = await site.start_prefill("p0")
        async with grpc.aio.insecure_channel(address.address) as channel:
            call = session_pb2_grpc.PrefillNodeStub(channel).Watch(HELLO)
            messages = [message async for message in take(call, 3)]
            call.cancel()
        assert (messages[0].welcome.node, messages[0].welcome.role) == ("p0", "prefill")
        for message in messages[1:]:
            assert message.status.ready
            assert (message.status.free_blocks, message.status.total_blocks) == (64, 64)


@pytest.mark.parametrize(("hello", "words"), WRONG_HELLOS)
async def test_a_watching_router_that_does_not_fit_is_refused(hello, words):
    async with Site() as site:
        address = await site.start_prefill("p0")
        async with grpc.aio.insecure_channel(address.address) as channel:
            reason = await refusal(session_pb2_grpc.PrefillNodeStub(channel).Watch(hello))
        assert all(word in reason for word in words)


async def test_a_decode_node_that_says_nothing_is_left_after_a_while():
    async with Site(silence_s=0.4) as site:
        address = await site.start_prefill("p0")
        await site.start_decode()
        hello = session_pb2.PrefillRequest(hello=site.record("decode-0"))
        outbox: Outbox[session_pb2.PrefillRequest] = Outbox()
        outbox.put(hello)
        async with grpc.aio.insecure_channel(address.address) as channel:
            call = session_pb2_grpc.PrefillNodeStub(channel).Session(aiter(outbox))
            began_s = time.monotonic()
            async with asyncio.timeout(5):
                kinds = [message.WhichOneof("message") async for message in call]
        assert time.monotonic() - began_s > 0.3
        assert kinds[0] == "welcome"


async def test_a_decode_node_that_does_not_read_is_left_with_all_that_it_asked_for():
    async with Site(longest_s=0.1) as site:
        address = await site.start_prefill("p0")
        await site.start_decode()
        outbox: Outbox[session_pb2.PrefillRequest] = Outbox(
            session_pb2.PrefillRequest(heartbeat=session_pb2.Heartbeat())
        )
        outbox.put(session_pb2.PrefillRequest(hello=site.record("decode-0")))
        node = site.nodes["p0"].node
        assert isinstance(node, PrefillNode)
        async with grpc.aio.insecure_channel(address.address) as channel:
            call = session_pb2_grpc.PrefillNodeStub(channel).Session(aiter(outbox))
            async with asyncio.timeout(PATIENCE_S):
                while not node._sessions:
                    await site.post.pause(0.01)
                (session,) = node._sessions.values()
                for _ in range(MAX_OUTPUT_BYTES // (2 << 20) + 9):
                    session.outbox.put(session_pb2.PrefillMessage(status=huge_status()))
                while node._sessions:
                    await site.post.pause(0.01)
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass


class SilentPrefillNode(session_pb2_grpc.PrefillNodeServicer):
    """Welcomes, says that its links are there, and nothing more."""

    def __init__(self) -> None:
        self.record = session_pb2.CompatibilityRecord()
        self.num_asked = 0

    async def Session(self, request_iterator, context):
        yield session_pb2.PrefillMessage(welcome=self.record)
        yield session_pb2.PrefillMessage(links_ready=session_pb2.LinksReady())
        async for message in request_iterator:
            self.num_asked += message.HasField("prefill")

    async def Watch(self, request, context):
        yield session_pb2.WatchMessage()


async def test_a_prefill_node_that_says_nothing_is_left_after_a_while():
    servicer = SilentPrefillNode()
    server = grpc.aio.server()
    session_pb2_grpc.add_PrefillNodeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Site(silence_s=1.3) as site:
        await site.start_decode()
        address = await site.start_prefill("p0")
        servicer.record.CopyFrom(site.record("p0"))
        router = await site.start_router()
        site.decode.set_prefill_nodes((replace(address, address=f"127.0.0.1:{port}"),))
        await router.until(lambda: router.connected == ["p0"])
        asked = ask(site.model, 1, prompt_len=20, max_tokens=3, prefill_nodes=("p0",))
        router.submit(asked)
        await router.until_over(asked)
        assert servicer.num_asked == 1
        assert asked.got == asked.expected
        await site.until_free()
    await server.stop(0)
