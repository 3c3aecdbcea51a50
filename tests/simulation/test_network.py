"""The memory network does what gRPC does: each test runs over both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine

import grpc
import pytest

from pdserve.rpc.network import GrpcNetwork, Network
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import MemoryNetwork
from tests.simulation.pipes import Wires

Scenario = Callable[[Network], Coroutine[None, None, None]]
UNIT = 0.2  # seconds
# A handler whose client has gone reads the end of its requests or is cancelled before.
BOTH_ENDS = (["cancelled"], ["the client said all"])
HELLO = session_pb2.RouterMessage(hello=session_pb2.RouterHello(router_id="me"))
BEAT = session_pb2.RouterMessage(heartbeat=session_pb2.Heartbeat())


def over_grpc(scenario: Scenario) -> None:
    asyncio.run(scenario(GrpcNetwork()))


def in_memory(scenario: Scenario) -> None:
    loop = VirtualLoop()
    network = MemoryNetwork(Wires(loop, longest_s=0.01, seed=0))
    try:
        loop.run_until_complete(loop.process("all").run(scenario(network), "scenario"))
        assert not loop.problems
    finally:
        network.wires.is_over = True
        loop.close_down()


both = pytest.mark.parametrize("run", [over_grpc, in_memory])


class Echo(session_pb2_grpc.DecodeNodeServicer):
    """Answers each message with a status that counts them; notes how its calls end."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.ended = asyncio.Event()

    async def Session(self, request_iterator, context):
        count = 0
        try:
            async for message in request_iterator:
                count += 1
                if message.HasField("abort"):
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "as asked")
                if message.HasField("submit"):
                    raise ValueError("a fault")
                status = session_pb2.NodeStatus(running=count)
                yield session_pb2.DecodeMessage(status=status)
            self.ends.append("the client said all")
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        finally:
            self.ended.set()


async def serve(network: Network, servicer: Echo) -> tuple[grpc.aio.Server, str]:
    server = network.server()
    session_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)
    port = network.bind(server, "127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def session(channel: grpc.aio.Channel, messages: AsyncIterator[session_pb2.RouterMessage]):
    return session_pb2_grpc.DecodeNodeStub(channel).Session(messages)


async def say(*messages, then_wait: bool = True):
    for message in messages:
        yield message
    if then_wait:
        await asyncio.Event().wait()


async def code_of(call) -> grpc.StatusCode:
    """With which error it ends."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await last_of(call)
    return raised.value.code()


async def last_of(call) -> None:
    async for _ in call:
        pass


@both
def test_messages_come_in_order_and_the_end_of_one_side_is_the_end_of_the_other(run):
    async def scenario(network: Network) -> None:
        echo = Echo()
        server, address = await serve(network, echo)
        async with network.channel(address) as channel:
            answers = aiter(session(channel, say(HELLO, BEAT, BEAT, then_wait=False)))
            assert [m.status.running async for m in answers] == [1, 2, 3]
        assert echo.ends == ["the client said all"]
        await server.stop(None)

    run(scenario)


@both
def test_a_client_that_leaves_cancels_what_serves_it(run):
    async def scenario(network: Network) -> None:
        echo = Echo()
        server, address = await serve(network, echo)
        async with network.channel(address) as channel:
            assert (await anext(aiter(session(channel, say(HELLO))))).status.running == 1
        await asyncio.wait_for(echo.ended.wait(), 20 * UNIT)
        assert echo.ends in BOTH_ENDS
        await server.stop(None)

    run(scenario)


@both
def test_who_reads_for_too_long_and_is_cancelled_ends_the_call(run):
    async def scenario(network: Network) -> None:
        echo = Echo()
        server, address = await serve(network, echo)
        async with network.channel(address) as channel:
            answers = aiter(session(channel, say(HELLO)))
            await anext(answers)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(UNIT):
                    await anext(answers)
            await asyncio.wait_for(echo.ended.wait(), 20 * UNIT)
        assert echo.ends in BOTH_ENDS
        await server.stop(None)

    run(scenario)


@both
@pytest.mark.parametrize(
    ("message", "code"),
    [
        (session_pb2.RouterMessage(abort=session_pb2.RequestKey()), "FAILED_PRECONDITION"),
        (session_pb2.RouterMessage(submit=session_pb2.NodeRequest()), "UNKNOWN"),
    ],
)
def test_a_handler_that_aborts_or_fails_tells_its_client(run, message, code):
    async def scenario(network: Network) -> None:
        server, address = await serve(network, Echo())
        async with network.channel(address) as channel:
            answers = aiter(session(channel, say(HELLO, message)))
            assert (await code_of(answers)).name == code
        await server.stop(None)

    run(scenario)


@both
def test_nobody_there_is_unavailable(run):
    async def scenario(network: Network) -> None:
        server, address = await serve(network, Echo())
        await server.stop(None)
        async with network.channel(address) as channel:
            answers = aiter(session(channel, say(HELLO)))
            assert await code_of(answers) is grpc.StatusCode.UNAVAILABLE

    run(scenario)


@both
def test_a_server_that_stops_ends_its_calls(run):
    async def scenario(network: Network) -> None:
        echo = Echo()
        server, address = await serve(network, echo)
        async with network.channel(address) as channel:
            answers = aiter(session(channel, say(HELLO)))
            await anext(answers)
            stopping = asyncio.create_task(server.stop(UNIT))
            assert await code_of(answers) in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.CANCELLED,
            )
            await stopping
        assert echo.ends in BOTH_ENDS

    run(scenario)
