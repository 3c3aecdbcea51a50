"""How calls of the public gRPC service end and last: deadlines, statuses, watching, reflection."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pdserve.core import errors
from pdserve.core.config import LimitsConfig
from pdserve.core.errors import PdserveError
from pdserve.core.request import Request
from pdserve.rpc.failures import KIND_KEY
from pdserve.rpc.public import CLIENT_OPTIONS, CLIENT_PING_MS
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from router.grpc_limits import LEAST_PING_INTERVAL_MS, public_options
from tests.router.conftest import ANSWER, World, WorldMaker, until
from tests.router.fake_nodes import Behaviour, FakeDecodeNode, FakeSession, silent

if TYPE_CHECKING:  # of the stubs' types only
    from pdserve.rpc.v1.inference_pb2_grpc import InferenceAsyncStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 0.5


@pytest_asyncio.fixture(loop_scope="module")
async def channel(world: World) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(world.router.grpc_address, CLIENT_OPTIONS) as made:
        yield made


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> "InferenceAsyncStub":
    return inference_pb2_grpc.InferenceStub(channel)


async def one_token(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    """Begins an answer, and says no more."""
    session.say(request, 0, 0, node.answer_ids[:1])


@pytest.mark.parametrize("behave", [silent, one_token], ids=["before a token", "between tokens"])
@pytest.mark.parametrize("best_of", [1, 2])
async def test_a_deadline_that_passes_ends_the_request_on_its_node(
    world: World, stub: "InferenceAsyncStub", behave: Behaviour, best_of: int
) -> None:
    node = world.decode[0]
    node.behave = behave
    sampling = pb.SamplingParams(best_of=best_of)
    request = pb.GenerateRequest(text="Hello", sampling=sampling)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        assert [message async for message in stub.Generate(request, timeout=DEADLINE_S)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: node.aborted == [node.submitted[0].key])
    await world.until_idle()


async def test_a_deadline_that_passes_in_the_queue_ends_the_wait(make_world: WorldMaker) -> None:
    limits = LimitsConfig(max_sent_ahead=0, kv_watermark=1.0)
    async with (
        make_world(limits=limits) as world,
        grpc.aio.insecure_channel(world.router.grpc_address, CLIENT_OPTIONS) as channel,
    ):
        node = world.decode[0]
        node.free_blocks, node.running = 0, 1
        node.tell_state()
        async with asyncio.timeout(10):
            while (await world.nodes())[0]["free_blocks"] != 0:
                await asyncio.sleep(0.01)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="Hello"), timeout=DEADLINE_S
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert [message async for message in call]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await world.until_idle()
        assert not node.submitted


def public_errors() -> list[type[PdserveError]]:
    """Every class that a request can end with."""
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    named = [
        item for item in classes if issubclass(item, PdserveError) and item is not PdserveError
    ]
    # The command line's.
    nobodys = (errors.ConfigError, errors.ModelFilesError, errors.RayLostError)
    return [item for item in named if not issubclass(item, nobodys)]


@pytest.mark.parametrize("error", public_errors(), ids=lambda error: error.__name__)
async def test_a_failure_has_the_status_of_its_error(
    world: World, stub: "InferenceAsyncStub", error: type[PdserveError]
) -> None:
    kind = error.__new__(error).kind

    async def fails(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.fail(request, kind, "it broke", retryable=False)

    world.decode[0].behave = fails
    with pytest.raises(grpc.aio.AioRpcError, match="it broke") as caught:
        assert [message async for message in stub.Generate(pb.GenerateRequest(text="Hello"))]
    assert caught.value.code() is grpc.StatusCode[error.grpc_status]
    assert dict(caught.value.trailing_metadata() or ())[KIND_KEY] == kind


async def test_loads_are_watched(world: World, stub: "InferenceAsyncStub") -> None:
    call = stub.WatchLoads(pb.WatchLoadsRequest(interval_s=0.1))
    loads = aiter(call)
    first = await anext(loads)
    assert [(load.node, load.ready, load.block_size) for load in first.nodes] == [
        ("decode-0", True, 16)
    ]
    world.decode[0].free_blocks = 7
    world.decode[0].tell_state()
    async with asyncio.timeout(10):
        while (await anext(loads)).nodes[0].free_blocks != 7:
            pass
    call.cancel()


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 1e9, float("nan"), float("inf")])
async def test_an_interval_out_of_range_is_named(
    stub: "InferenceAsyncStub", interval_s: float
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="interval_s") as caught:
        assert [item async for item in stub.WatchLoads(pb.WatchLoadsRequest(interval_s=interval_s))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_our_clients_ask_less_often_than_the_router_allows() -> None:
    server = dict(public_options(LimitsConfig()))
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] == LEAST_PING_INTERVAL_MS
    assert CLIENT_PING_MS > LEAST_PING_INTERVAL_MS
    assert server["grpc.keepalive_time_ms"] > 0


async def test_reflection_is_enough_to_call_without_our_stubs(
    world: World, channel: grpc.aio.Channel
) -> None:
    """As grpcurl does: ask for the descriptors, make the message of JSON, call by name."""
    pool = await reflected(channel, "pdserve.v1.Inference")
    method = pool.FindServiceByName("pdserve.v1.Inference").FindMethodByName("Generate")
    make = message_factory.GetMessageClass
    request = json_format.Parse('{"text": "Hello"}', make(method.input_type)())
    call: Any = channel.unary_stream(
        "/pdserve.v1.Inference/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=make(method.output_type).FromString,
    )
    answers = [json_format.MessageToDict(message) async for message in call(request)]
    assert "".join(answer.get("text", "") for answer in answers) == ANSWER


async def test_grpcios_own_reflection_client_is_enough_too(world: World) -> None:
    def ask() -> str:
        with grpc.insecure_channel(world.router.grpc_address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert "pdserve.v1.Inference" in database.get_services()
            pool = descriptor_pool.DescriptorPool(database)
            method = pool.FindServiceByName("pdserve.v1.Inference").FindMethodByName("Generate")
            make = message_factory.GetMessageClass
            call: Any = channel.unary_stream(
                "/pdserve.v1.Inference/Generate",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=make(method.output_type).FromString,
            )
            request = json_format.Parse('{"text": "Hello"}', make(method.input_type)())
            return "".join(message.text for message in call(request))

    assert await asyncio.to_thread(ask) == ANSWER


async def reflected(channel: grpc.aio.Channel, symbol: str) -> descriptor_pool.DescriptorPool:
    """A pool with the files that define a symbol, from the server itself."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    (answer,) = [item async for item in stub.ServerReflectionInfo(iter([request]))]
    pool = descriptor_pool.DescriptorPool()
    for data in answer.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    return pool
