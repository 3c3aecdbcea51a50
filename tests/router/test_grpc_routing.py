"""What the public gRPC service says and takes about routing: as HTTP does."""

import grpc
import pytest

from pdserve.core.config import RouterConfig
from pdserve.rpc.session import CHANNEL_OPTIONS
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from tests.router.conftest import World, WorldMaker


async def generate(world: World, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """The last message."""
    async with grpc.aio.insecure_channel(world.router.grpc_address, options=CHANNEL_OPTIONS) as c:
        stub = inference_pb2_grpc.InferenceStub(c)
        return [message async for message in stub.Generate(request)][-1]


async def test_a_timeline_says_what_was_planned_and_why(make_world: WorldMaker) -> None:
    async with make_world(num_prefill=1) as world:
        sampling = pb.SamplingParams(max_tokens=1)
        request = pb.GenerateRequest(text="Hello", sampling=sampling, timeline=True)
        timeline = (await generate(world, request)).timeline
        assert timeline.planned == timeline.route == "disaggregated"
        assert "prefill-0" in timeline.explain


async def test_limits_of_a_request_reach_the_policy(make_world: WorldMaker) -> None:
    async with make_world(routing=RouterConfig(policy="slo")) as world:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1] * 50),
            sampling=pb.SamplingParams(max_tokens=1),
            timeline=True,
            ttft_slo_ms=400,
            tpot_slo_ms=20,
        )
        explain = (await generate(world, request)).timeline.explain
        assert "50 ms of 400 ms, between tokens 10 ms of 20 ms" in explain


@pytest.mark.parametrize("field", ["ttft_slo_ms", "tpot_slo_ms"])
async def test_a_limit_that_is_none_is_refused_by_name(make_world: WorldMaker, field: str) -> None:
    async with make_world() as world:
        request = pb.GenerateRequest(text="Hello")
        setattr(request, field, 0.0)
        with pytest.raises(grpc.aio.AioRpcError, match=field) as refused:
            await generate(world, request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
