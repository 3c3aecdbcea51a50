"""The public gRPC service, before a fake decode node."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.core.config import LimitsConfig
from pdserve.core.request import Request
from pdserve.rpc.failures import KIND_KEY
from pdserve.rpc.session import CHANNEL_OPTIONS
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import ANSWER, World, WorldMaker, until
from tests.router.fake_nodes import CACHED_TOKENS, FakeDecodeNode, FakeSession, flood

if TYPE_CHECKING:  # of the stubs' types only
    from pdserve.rpc.v1.inference_pb2_grpc import InferenceAsyncStub

pytestmark = pytest.mark.asyncio(loop_scope="module")


def open_channel(world: World) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(world.router.grpc_address, options=CHANNEL_OPTIONS)


@pytest_asyncio.fixture(loop_scope="module")
async def channel(world: World) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(world) as made:
        yield made


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> "InferenceAsyncStub":
    return inference_pb2_grpc.InferenceStub(channel)


async def test_a_stream_is_deltas_and_then_usage(world: World, stub: "InferenceAsyncStub") -> None:
    request = pb.GenerateRequest(text="Hello", sampling=pb.SamplingParams(n=2), timeline=True)
    *deltas, last = [message async for message in stub.Generate(request)]
    for choice in (0, 1):
        mine = [message for message in deltas if message.choice == choice]
        assert "".join(message.text for message in mine) == ANSWER
        assert [message.finish_reason for message in mine][-1] == "stop"
        ids = [token_id for message in mine for token_id in message.token_ids]
        assert ids == list(world.decode[0].answer_ids)
    assert last.usage.completion_tokens == 2 * len(world.decode[0].answer_ids)
    assert last.usage.cached_tokens == last.timeline.cached_tokens == CACHED_TOKENS
    assert last.timeline.route == "local"
    assert {message.request_id for message in (*deltas, last)} == {
        world.decode[0].submitted[0].request_id
    }


async def test_unset_is_not_zero(world: World, stub: "InferenceAsyncStub") -> None:
    unset = pb.GenerateRequest(text="Hello")
    zero = pb.GenerateRequest(
        text="Hello", sampling=pb.SamplingParams(temperature=0, seed=0, logprobs=0)
    )
    for request in (unset, zero):
        assert [message async for message in stub.Generate(request)]
    first, second = (request.sampling for request in world.decode[0].submitted)
    assert (first.temperature, first.logprobs) == (1.0, None)
    assert (second.temperature, second.seed, second.logprobs) == (0.0, 0, 0)


async def test_ids_and_chats_are_prompts_too(
    world: World, stub: "InferenceAsyncStub", tokenizer: Tokenizer
) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
    for request in (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6])),
        pb.GenerateRequest(chat=chat),
    ):
        assert [message async for message in stub.Generate(request)]
    first, second = (request.token_ids for request in world.decode[0].submitted)
    assert first == (5, 6)
    text = tokenizer.decode(second, skip_special_tokens=False)
    assert text == "<|start|>user\nHello<|end|>\n<|start|>assistant\n"


async def test_logprobs_and_stop_reasons_come_along(
    stub: "InferenceAsyncStub",
) -> None:
    sampling = pb.SamplingParams(logprobs=1, stop=["jumps"])
    request = pb.GenerateRequest(text="Hello", sampling=sampling)
    *deltas, last = [message async for message in stub.Generate(request)]
    assert deltas[-1].stop_string == "jumps"
    logprobs = [item for message in deltas for item in message.logprobs]
    assert len(logprobs) == last.usage.completion_tokens
    assert (logprobs[0].logprob, logprobs[0].top[0].logprob) == (-0.5, -0.5)


@pytest.mark.parametrize(
    ("request_", "status", "word"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**9])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "prompt[0]",
        ),
        (
            pb.GenerateRequest(chat=pb.ChatMessages()),
            grpc.StatusCode.INVALID_ARGUMENT,
            "messages",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=0)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "top_p",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=5000)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_tokens",
        ),
        (pb.GenerateRequest(text="x", model="other"), grpc.StatusCode.NOT_FOUND, "model"),
    ],
)
async def test_a_wrong_field_is_named_with_the_status_of_its_error(
    stub: "InferenceAsyncStub",
    request_: pb.GenerateRequest,
    status: grpc.StatusCode,
    word: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        assert [message async for message in stub.Generate(request_)]
    assert caught.value.code() is status
    assert word in str(caught.value.details())
    metadata = dict(caught.value.trailing_metadata() or ())
    assert str(metadata[KIND_KEY]).endswith("_error")


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x03\xff\xfe\xfd"])
async def test_bytes_that_are_no_message_are_the_clients_fault(
    world: World, channel: grpc.aio.Channel, method: str, data: bytes
) -> None:
    call: Any = channel.unary_stream(f"/pdserve.v1.Inference/{method}")  # raw bytes, any method
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        assert [message async for message in call(data)]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request: it cannot be decoded" in str(caught.value.details())
    assert dict(caught.value.trailing_metadata() or ())[KIND_KEY] == "invalid_request_error"
    assert not world.decode[0].submitted


async def slowly(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:5])


async def test_dropping_the_stream_aborts(world: World, stub: "InferenceAsyncStub") -> None:
    node = world.decode[0]
    node.behave = slowly
    call = stub.Generate(pb.GenerateRequest(text="Hello"))
    assert (await anext(aiter(call))).text
    call.cancel()
    await until(lambda: node.aborted == [node.submitted[0].key])


async def test_a_client_that_reads_nothing_is_dropped(make_world: WorldMaker) -> None:
    limits = LimitsConfig(client_stall_s=0.2)
    async with (
        make_world(limits=limits, max_model_len=4096) as world,
        open_channel(world) as channel,
    ):
        node = world.decode[0]
        node.behave = flood
        sampling = pb.SamplingParams(max_tokens=4001, logprobs=20, n=16)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="Hi", sampling=sampling)
        )
        request = await node.arrivals.get()
        await until(lambda: request.key in node.aborted)
        call.cancel()


async def test_abort_gives_the_reader_what_there_is(
    world: World, stub: "InferenceAsyncStub"
) -> None:
    node = world.decode[0]
    node.behave = slowly
    call = stub.Generate(pb.GenerateRequest(text="Hello"))
    messages = aiter(call)
    first = await anext(messages)
    answer = await stub.Abort(pb.AbortRequest(request_id=first.request_id))
    assert answer.found
    *_, end, last = [message async for message in messages]
    assert end.finish_reason == "abort"
    assert last.usage.completion_tokens == 5
    await until(lambda: node.aborted == [node.submitted[0].key])
    again = await stub.Abort(pb.AbortRequest(request_id=first.request_id))
    assert not again.found


async def test_the_model_and_the_server_tell_of_themselves(
    world: World, stub: "InferenceAsyncStub", tokenizer: Tokenizer
) -> None:
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model, model.architecture, model.dtype) == ("tiny", "LlamaForCausalLM", "float32")
    assert (model.max_model_len, list(model.eos_token_ids)) == (512, [tokenizer.eos_token_id])
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.ready, server.reason) == (True, "")
    assert set(server.routes) == {"disaggregated", "local", "fallback"}
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert [(load.node, load.role, load.free_blocks) for load in loads.nodes] == [
        ("decode-0", "decode", 1000)
    ]


async def test_text_is_tokenised_and_back(stub: "InferenceAsyncStub", tokenizer: Tokenizer) -> None:
    answer = await stub.Tokenize(pb.TokenizeRequest(text="The fox"))
    assert list(answer.token_ids) == tokenizer.encode("The fox")
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
    assert back.text == "The fox"
    with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\[0\]"):
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**9]))


async def test_health_follows_readiness(make_world: WorldMaker) -> None:
    async with (
        make_world() as world,
        open_channel(world) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        left = stub.Watch(health_pb2.HealthCheckRequest())
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        async with asyncio.timeout(5):
            await left.read()
            left.cancel()
            while await watch.read() != serving:
                pass
            await world.decode[0].stop()
            answer = await watch.read()
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_of_services_that_there_are_not_health_says_so(channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    other = health_pb2.HealthCheckRequest(service="other.Service")
    with pytest.raises(grpc.aio.AioRpcError, match="there is none of this name") as raised:
        await stub.Check(other)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(other)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    listing: Any = channel.unary_unary("/grpc.health.v1.Health/List")
    with pytest.raises(grpc.aio.AioRpcError, match="ask for a service by Check"):
        await listing(b"")


async def test_reflection_lists_the_service(channel: grpc.aio.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = [item async for item in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answer.list_services_response.service}
    assert {"pdserve.v1.Inference", "grpc.health.v1.Health"} <= names
