"""What a stranger may send over gRPC: sizes, and messages that do not come."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pdserve.core.config import LimitsConfig
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from router.grpc_shares import MAX_CHECKS_OF_CONNECTION, SHARE
from tests.router.conftest import WAIT_S, World, WorldMaker, until
from tests.router.fake_nodes import silent
from tests.security.http2 import taking_nothing
from tests.security.keys import ALICE, KEYS, TOKEN, metadata
from tests.security.raw import say

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = LimitsConfig(
    body_timeout_s=0.3, max_body_bytes=10_000, max_header_bytes=4096, max_grpc_calls=16
)

HEALTH, REFLECTION = "/grpc.health.v1.Health", "/grpc.reflection.v1alpha.ServerReflection"
OTHER = (("grpc.use_local_subchannel_pool", 1),)  # else channels share a connection


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bounded(make_world: WorldMaker):
    async with make_world(limits=LIMITS) as made:
        yield made


async def status_of(awaited: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaited
    return raised.value.code(), raised.value.details() or ""


async def never():
    await asyncio.sleep(60)
    yield b""


@pytest.mark.parametrize(
    "method",
    [
        "/pdserve.v1.Inference/Generate",
        "/pdserve.v1.Inference/Tokenize",
        "/pdserve.v1.Inference/Abort",
        f"{HEALTH}/Check",
        f"{HEALTH}/List",
        f"{HEALTH}/Watch",
    ],
)
async def test_a_message_that_does_not_come_ends_its_call(bounded: World, method: str) -> None:
    async with grpc.aio.insecure_channel(bounded.router.grpc_address) as channel:
        call: Any = channel.stream_stream(method)(never())
        code, details = await status_of(call.read())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "request: it took more than 0.3 s to come"


async def test_a_large_message_is_refused(bounded: World) -> None:
    async with grpc.aio.insecure_channel(bounded.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        code, _ = await status_of(stub.Tokenize(pb.TokenizeRequest(text="x" * 20_000)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_large_metadata_are_refused(bounded: World) -> None:
    async with grpc.aio.insecure_channel(bounded.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        given = (("x-large", "x" * 20_000),)
        code, _ = await status_of(stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=given))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_too_many_metadata_entries_are_refused(bounded: World, method: str) -> None:
    async with grpc.aio.insecure_channel(bounded.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        given = tuple((f"x{i}", "") for i in range(LIMITS.max_headers + 1))
        call: Any = channel.stream_stream(f"/pdserve.v1.Inference/{method}")(
            never(), metadata=given
        )
        code, details = await status_of(call.read())
        assert (await stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=given[:90])).token_ids
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "at most 100" in details


MANY = 3_000_000


@pytest.mark.parametrize(
    ("method", "message", "field"),
    [
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * MANY), "token_ids"),
        ("Generate", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * MANY)), "prompt"),
        (
            "Generate",
            pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * 10_000)),
            "messages",
        ),
        (
            "Generate",
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop=["a"] * 10_000)),
            "stop",
        ),
        ("Tokenize", pb.TokenizeRequest(text="a" * 9_000_000), "text"),
    ],
)
async def test_what_is_far_too_much_is_an_invalid_argument(
    world: World, method: str, message: Any, field: str
) -> None:
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = getattr(stub, method)(message)
        code, details = await status_of(call.read() if method == "Generate" else call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(f"{field}: ")
    assert len(details) < 300


async def test_more_calls_than_allowed_are_refused_and_the_next_is_served(bounded: World) -> None:
    node = bounded.decode[0]
    node.forget()
    node.behave = silent
    async with grpc.aio.insecure_channel(bounded.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(text="Hi")) for _ in range(LIMITS.max_grpc_calls)]
        await until(lambda: len(node.submitted) == LIMITS.max_grpc_calls)
        async with grpc.aio.insecure_channel(bounded.router.grpc_address, OTHER) as another:
            other: Any = inference_pb2_grpc.InferenceStub(another)
            code, _ = await status_of(other.Tokenize(pb.TokenizeRequest(text="x")))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            for call in calls:
                call.cancel()
            await until(lambda: len(node.aborted) == LIMITS.max_grpc_calls)
            assert (await other.Tokenize(pb.TokenizeRequest(text="x"))).token_ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(make_world: WorldMaker):
    """With API keys, and as many calls as by default."""
    async with make_world(api_keys=KEYS, admin_token=TOKEN) as made:
        yield made


async def everything_is_served(world: World) -> None:
    """By another connection than those that are held open."""
    async with grpc.aio.insecure_channel(world.router.grpc_address, OTHER) as channel:
        inference: Any = inference_pb2_grpc.InferenceStub(channel)
        asked = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(max_tokens=3))
        answers = inference.Generate(asked, metadata=metadata(ALICE))
        assert sum([len(message.token_ids) async for message in answers]) == 3
        health: Any = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method", [f"{HEALTH}/Watch", f"{REFLECTION}/ServerReflectionInfo"])
async def test_streams_of_other_services_have_a_share_and_no_more(
    closed: World, method: str
) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")

    async def messages():
        yield b"" if method.startswith(HEALTH) else asked.SerializeToString()
        await asyncio.sleep(60)

    async with grpc.aio.insecure_channel(closed.router.grpc_address) as channel:
        stream: Any = channel.stream_stream(method)
        calls = [stream(messages(), metadata=metadata(ALICE)) for _ in range(SHARE)]
        for call in calls:
            assert await call.read()
        code, details = await status_of(stream(messages(), metadata=metadata(ALICE)).read())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details == f"at most {SHARE} calls are allowed of {method} at once"
        await everything_is_served(closed)
        calls.pop().cancel()
        async with asyncio.timeout(WAIT_S):
            while not await is_let_in(stream(messages(), metadata=metadata(ALICE))):
                await asyncio.sleep(0.01)


async def is_let_in(call: Any) -> bool:
    try:
        return bool(await call.read())
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False


async def test_health_checks_whose_message_does_not_come_keep_nobody_out(closed: World) -> None:
    async with AsyncExitStack() as stack:
        calls: list[Any] = []
        for _ in range(2 * SHARE // MAX_CHECKS_OF_CONNECTION):
            channel = grpc.aio.insecure_channel(closed.router.grpc_address, OTHER)
            check: Any = (await stack.enter_async_context(channel)).stream_unary(f"{HEALTH}/Check")
            calls += [check(never()) for _ in range(MAX_CHECKS_OF_CONNECTION)]
        await until(lambda: sum(call.done() for call in calls) == SHARE)
        await everything_is_served(closed)
        code, details = await status_of(next(call for call in calls if call.done()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details == f"{HEALTH}/Check: more than {SHARE} calls wait for their messages"
        assert not all(call.done() for call in calls)


async def test_calls_whose_client_takes_no_answer_keep_nobody_out(bounded: World) -> None:
    """Its window is 0, so what it is answered is never sent and none of its calls is ever over."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            client = await stack.enter_async_context(taking_nothing(bounded.router.grpc_address))
            for _ in range(LIMITS.max_grpc_calls):
                await client.call(f"{HEALTH}/Check")
            await client.until_answered(LIMITS.max_grpc_calls)
        async with grpc.aio.insecure_channel(bounded.router.grpc_address, OTHER) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            assert (await stub.Tokenize(pb.TokenizeRequest(text="x"))).token_ids
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status


async def test_of_one_connection_few_health_checks_are_not_over(closed: World) -> None:
    async with taking_nothing(closed.router.grpc_address) as client:
        for _ in range(MAX_CHECKS_OF_CONNECTION + 5):
            await client.call(f"{HEALTH}/Check")
        await client.until_answered(MAX_CHECKS_OF_CONNECTION + 5)
        assert client.num_over == 5
        await everything_is_served(closed)


async def test_where_few_calls_are_allowed_most_are_for_our_own_service(bounded: World) -> None:
    async with grpc.aio.insecure_channel(bounded.router.grpc_address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        assert sum([await is_let_in(call) for call in calls]) == 2


@pytest.mark.parametrize(
    "data", [b"", b"PRI * HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64]
)
@pytest.mark.slow
async def test_a_connection_that_shakes_no_hands_is_closed(bounded: World, data: bytes) -> None:
    heard = await say(bounded.router.grpc_address, data)
    assert heard.after_s < 15
