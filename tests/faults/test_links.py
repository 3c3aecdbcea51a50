"""The connections between router, decode node and prefill node are cut, frozen, slowed, garbled and
doubled at each stage of a request: the client gets the right tokens, and all blocks come back.

Whole nodes and a whole router in this process, over real gRPC and HTTP, with ranks that compute a
known answer. What happens to KV between ranks is in ``tests/kv_transfer``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig, RouterConfig
from router.server import Router, start_router
from router.service import RouterSpec
from tests.faults.proxy import FAULTS, Fault, Proxy, start_proxy
from tests.nodes.site import PATIENCE_S, Site
from tests.nodes.specs import MODEL
from tests.text.tiny_models import byte_level, save

SILENCE_S = 2.0
HELD_S = 3.0  # how long a fault lasts: longer than silence may
PROMPTS = [[(i * 7 + k) % 60 for i in range(100)] for k in range(4)]
MAX_TOKENS = 60
LINKS = ("router-decode", "decode-prefill")


@dataclass
class Linked:
    """A decode node behind a proxy, two prefill nodes of which the first is, and a router."""

    site: Site
    proxies: dict[str, Proxy]
    router: Router
    client: httpx.AsyncClient

    @property
    def all_are_in(self) -> bool:
        """One that comes to the router while it has no decode node is refused, and rightly."""
        return self.site.decode.node.num_requests == len(PROMPTS)

    async def answers(self) -> list[list[int]]:
        """All prompts at once: half of them greedy, half sampled with a seed."""
        calls = [self._ask(number) for number in range(len(PROMPTS))]
        return [
            response.json()["choices"][0]["token_ids"] for response in await asyncio.gather(*calls)
        ]

    async def until_ready(self) -> None:
        async with asyncio.timeout(3 * PATIENCE_S):
            while (await self.client.get("/ready")).json()["status"] != "ready":
                await self.site.post.pause(0.05)
            while not {"p0", "p1"} <= set(self.site.decode.node.legs.connected):
                await self.site.post.pause(0.05)

    async def _ask(self, number: int) -> httpx.Response:
        body = {
            "prompt": PROMPTS[number],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": number % 2,
            "seed": number,
        }
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


@asynccontextmanager
async def linked(model_dir: Path) -> AsyncIterator[Linked]:
    async with Site(longest_s=0.02, silence_s=SILENCE_S) as site:
        decode = DecodeConfig(
            max_num_seqs=32, max_num_batched_tokens=64, enable_prefix_caching=False
        )
        prefill = PrefillConfig(max_num_batched_tokens=32, enable_prefix_caching=False)
        await site.start_decode(decode, num_blocks=256)
        addresses = [await site.start_prefill(name, prefill) for name in ("p0", "p1")]
        proxies = {
            "router-decode": await start_proxy(site.decode.address.address),
            "decode-prefill": await start_proxy(addresses[0].address),
        }
        behind = replace(addresses[0], address=proxies["decode-prefill"].address)
        site.decode.set_prefill_nodes((behind, addresses[1]))
        seen = replace(site.decode.address, address=proxies["router-decode"].address)
        router = await start_router(
            _router_spec(model_dir, (seen, *addresses)), silence_s=SILENCE_S
        )
        client = httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=60, trust_env=False
        )
        try:
            made = Linked(site, proxies, router, client)
            await made.until_ready()
            yield made
        finally:
            await client.aclose()
            await router.close(0.0)
            for proxy in proxies.values():
                await proxy.close()


def _router_spec(model_dir: Path, nodes) -> RouterSpec:
    return RouterSpec(
        config=RouterConfig(http_port=0, grpc_port=0, local_prefill_below=0),
        served_name="tiny",
        model_dir=model_dir,
        model=MODEL,
        dtype="float32",
        max_model_len=None,
        headroom_tokens=8,
        prefill_configured=True,
        nodes=nodes,
    )


STAGES: dict[str, Callable[[Site], bool]] = {
    "queued": lambda site: site.decode.node.num_requests > 0,
    "prefilling": lambda site: site.prefill.scheduler.num_running > 0,
    "transferring": lambda site: any(site.ranks["p0"].endpoints[0].sending),
    "decoding": lambda site: site.decode.node.scheduler.num_running > 0,
}
CASES = [
    pytest.param(
        link,
        stage,
        fault,
        id=f"{link} {name} {stage_name}",
        marks=() if (stage_name, name) == ("decoding", "cut") else pytest.mark.faults,
    )
    for link in LINKS
    for stage_name, stage in STAGES.items()
    for name, fault in FAULTS.items()
]


@pytest.mark.parametrize(("link", "stage", "fault"), CASES)
async def test_a_faulty_link_costs_time_and_no_token(
    model_dir: Path, link: str, stage: Callable[[Site], bool], fault: Fault
) -> None:
    async with linked(model_dir) as world:
        undisturbed = await world.answers()
        running = asyncio.create_task(world.answers())
        async with asyncio.timeout(PATIENCE_S):
            while not (world.all_are_in and stage(world.site)) and not running.done():
                await world.site.post.pause(0.002)
        proxy = world.proxies[link]
        fault(proxy)
        await asyncio.wait((running,), timeout=HELD_S)
        proxy.heal()
        assert await running == undisturbed
        await world.until_ready()
        await world.site.until_free()
        assert await world.answers() == undisturbed
        await world.site.until_free()
