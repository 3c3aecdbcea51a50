"""A router before whole nodes, over real gRPC and HTTP: what crosses all three."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pdserve.core.config import RouterConfig
from pdserve.telemetry.traces import Tracer
from router.server import start_router
from router.service import RouterSpec
from tests.nodes.site import PATIENCE_S, Site
from tests.nodes.specs import MODEL
from tests.text.tiny_models import byte_level, save

ALL_DISAGGREGATED = RouterConfig(http_port=0, grpc_port=0, local_prefill_below=0)
PROMPT = [i * 7 % 60 for i in range(120)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


@asynccontextmanager
async def router_of(
    site: Site,
    model_dir: Path,
    config: RouterConfig = ALL_DISAGGREGATED,
    tracer: Tracer | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that, by default, has every prompt prefilled on a prefill node."""
    spec = RouterSpec(
        config=config,
        served_name="tiny",
        model_dir=model_dir,
        model=MODEL,
        dtype="float32",
        max_model_len=None,
        headroom_tokens=8,
        prefill_configured=True,
        nodes=tuple(node.address for node in site.nodes.values()),
    )
    router = await start_router(spec, tracer=tracer)
    try:
        async with (
            httpx.AsyncClient(
                base_url=f"http://{router.http_address}", timeout=PATIENCE_S, trust_env=False
            ) as client,
            asyncio.timeout(3 * PATIENCE_S),
        ):
            while (await client.get("/ready")).json()["status"] != "ready":
                await site.post.pause(0.05)
            yield client
    finally:
        await router.close(0.0)


def ask(client: httpx.AsyncClient, **fields: object) -> asyncio.Task[httpx.Response]:
    body = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True, **fields}
    return asyncio.create_task(client.post("/v1/completions", json=body))


MOMENTS: dict[str, Callable[[Site], bool]] = {
    "computed there": lambda site: site.prefill.scheduler.num_running > 0,
    "on its way": lambda site: any(site.ranks["p0"].endpoints[0].sending),
    "decoded": lambda site: site.decode.node.scheduler.num_running > 0,
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_gives_every_block_back_on_both_nodes(
    model_dir: Path, moment: Callable[[Site], bool], stream: bool
) -> None:
    """Nothing else is asked for afterwards: nobody waits for new work to clean up.

    The whole answer would take longer than anybody waits here.
    """
    async with Site(longest_s=0.1) as site:
        await site.start_all("p0")
        async with router_of(site, model_dir) as client:
            call = ask(client, max_tokens=136, stream=stream)
            while not moment(site):
                await site.post.pause(0.05)
            call.cancel()
            await site.until_free()
            assert site.decode.node.num_requests == 0
            assert site.prefill.num_prefills == 0
            assert (await client.get("/admin/status")).json()["requests"] == 0


async def test_the_first_token_of_a_handoff_has_its_logprobs(model_dir: Path) -> None:
    async with Site() as site:
        await site.start_all("p0")
        async with router_of(site, model_dir) as client:
            answer = (await ask(client, max_tokens=5, logprobs=2, timeline=True)).json()
            (choice,) = answer["choices"]
            told = choice["logprobs"]["token_logprobs"]
            assert told == [-0.5 - token for token in choice["token_ids"]]
            assert answer["timeline"]["route"] == "disaggregated"
            assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_two_routers_before_the_same_nodes_do_not_meet(model_dir: Path) -> None:
    """The same requests, under the same label and seed, at the same time."""
    async with Site(longest_s=0.005) as site:
        await site.start_all("p0")
        async with router_of(site, model_dir) as one, router_of(site, model_dir) as other:
            calls = [
                ask(client, max_tokens=8, seed=seed, temperature=1.0)
                for seed in range(4)
                for client in (one, other)
            ]
            answers = [(await call).json()["choices"][0]["token_ids"] for call in calls]
            assert answers[::2] == answers[1::2]
            assert len({tuple(answer) for answer in answers}) == 4
            await site.until_free()
