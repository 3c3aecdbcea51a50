"""API keys over gRPC: who gets in, and that a tenant cannot end another's request."""

import asyncio
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.async_client import AsyncClient
from pdserve.core.errors import UnauthenticatedError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from tests.router.conftest import ANSWER, World, WorldMaker
from tests.router.fake_nodes import silent
from tests.security.keys import ALICE, BOB, KEYS, OPERATOR, STRANGER, TOKEN, metadata

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICE = "/pdserve.v1.Inference/"
METHODS = [
    f"{SERVICE}{method.name}" for method in pb.DESCRIPTOR.services_by_name["Inference"].methods
]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(make_world: WorldMaker):
    async with make_world(api_keys=KEYS, admin_token=TOKEN) as made:
        yield made


async def refusal(
    world: World, method: str, given: tuple[tuple[str, str], ...]
) -> grpc.aio.AioRpcError:
    """Of a call that never sends its message: it is not waited for."""

    async def nothing():
        await asyncio.sleep(60)
        yield b""

    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        call: Any = channel.stream_stream(method)(nothing(), metadata=given, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    return raised.value


@pytest.mark.parametrize("method", [*METHODS, REFLECTION, f"{SERVICE}Nothing"])
@pytest.mark.parametrize(
    "given",
    [
        (),
        (("authorization", "Bearer"),),
        (("authorization", f"Basic {ALICE}"),),
        metadata(STRANGER),
        metadata(ALICE[:-1]),
        metadata(TOKEN),
    ],
)
async def test_without_a_key_of_ours_every_method_is_closed(
    closed: World, method: str, given: tuple[tuple[str, str], ...]
) -> None:
    error = await refusal(closed, method, given)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    details = error.details() or ""
    assert not any(key[:-1] in details for key in (ALICE, STRANGER, TOKEN))


async def test_health_is_open(closed: World) -> None:
    async with grpc.aio.insecure_channel(closed.router.grpc_address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest())
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_client_with_a_key_may_call_all(closed: World) -> None:
    for key in (ALICE, OPERATOR):
        async with AsyncClient(closed.router.grpc_address, api_key=key) as client:
            assert (await client.generate("Hello", max_tokens=100)).choices[0].text == ANSWER
            assert (await client.model_info()).model == "tiny"
            assert (await client.server_info()).ready
            assert await client.loads()
            assert await client.detokenize(await client.tokenize("Hello")) == "Hello"
            assert not await client.abort("no such request")


async def test_a_client_without_one_is_told_what_is_missing(closed: World) -> None:
    async with AsyncClient(closed.router.grpc_address) as client:
        with pytest.raises(UnauthenticatedError, match="an API key is needed"):
            await client.generate("Hello")
        with pytest.raises(UnauthenticatedError):
            await client.model_info()


async def test_only_whose_request_it_is_may_end_it(closed: World) -> None:
    closed.decode[0].forget()
    closed.decode[0].behave = silent
    address = closed.router.grpc_address
    async with (
        AsyncClient(address, api_key=ALICE) as alice,
        AsyncClient(address, api_key=BOB) as bob,
    ):
        call = asyncio.ensure_future(alice.generate("Hello"))
        request = await closed.decode[0].arrivals.get()
        assert not await bob.abort(request.request_id)
        assert not call.done()
        assert await alice.abort(request.request_id)
        await asyncio.gather(call, return_exceptions=True)
    closed.decode[0].forget()


async def test_without_keys_anybody_may_end_what_runs(world: World) -> None:
    world.decode[0].behave = silent
    stub: Any
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="Hello"), metadata=metadata(ALICE))
        reading = asyncio.ensure_future(call.read())
        request = await world.decode[0].arrivals.get()
        answer = await stub.Abort(pb.AbortRequest(request_id=request.request_id))
        assert answer.found
        await asyncio.gather(reading, return_exceptions=True)
