"""gRPC's own deadlines, through a router and whole nodes: when one passes, both nodes let go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.core.config import RouterConfig
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from router.server import start_router
from router.service import RouterSpec
from tests.nodes.site import PATIENCE_S, Site
from tests.nodes.specs import MODEL
from tests.text.tiny_models import byte_level, save

DEADLINES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
PROMPT = [i * 7 % 60 for i in range(120)]


MOMENTS: dict[str, Callable[[Site], bool]] = {
    "computed there": lambda site: site.prefill.scheduler.num_running > 0,
    "on its way": lambda site: any(site.ranks["p0"].endpoints[0].sending),
    "decoded": lambda site: site.decode.node.scheduler.num_running > 0,
}


@asynccontextmanager
async def client_of(site: Site, model_dir: Path) -> AsyncIterator[Any]:
    """A stub of a router that has every prompt prefilled on a prefill node."""
    spec = RouterSpec(
        config=RouterConfig(http_port=0, grpc_port=0, local_prefill_below=0),
        served_name="tiny",
        model_dir=model_dir,
        model=MODEL,
        dtype="float32",
        max_model_len=None,
        headroom_tokens=8,
        prefill_configured=True,
        nodes=tuple(node.address for node in site.nodes.values()),
    )
    router = await start_router(spec)
    try:
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            async with asyncio.timeout(PATIENCE_S):
                while not (await stub.GetServerInfo(pb.GetServerInfoRequest())).ready:
                    await site.post.pause(0.05)
            yield stub
    finally:
        await router.close(0.0)


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
async def test_a_deadline_that_passes_gives_every_block_back_on_both_nodes(
    tmp_path: Path, moment: Callable[[Site], bool]
) -> None:
    """Longer and longer ones, until the moment was reached before it passed."""
    sampling = pb.SamplingParams(max_tokens=136, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)
    async with Site(longest_s=0.1) as site:
        await site.start_all("p0")
        async with client_of(site, save(tmp_path / "tiny", byte_level())) as stub:
            for deadline_s in DEADLINES_S:
                ending = asyncio.ensure_future(
                    status_of(stub.Generate(request, timeout=deadline_s))
                )
                seen = False
                while not ending.done():
                    seen = seen or moment(site)
                    await site.post.pause(0.02)
                assert ending.result() is grpc.StatusCode.DEADLINE_EXCEEDED
                await site.until_free()
                assert site.decode.node.num_requests == site.prefill.num_prefills == 0
                if seen:
                    return
        pytest.fail("the moment was never reached")


async def status_of(call: Any) -> grpc.StatusCode:
    """How the call ends."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
