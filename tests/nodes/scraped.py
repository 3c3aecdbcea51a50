"""A router and nodes that are scraped as Prometheus does it: found by the router, each in turn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode
from tests.nodes.site import Site
from tests.nodes.test_behind_a_router import router_of
from tests.telemetry.scrape import Scrape, problems


@asynccontextmanager
async def scraped_site(model_dir: Path) -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    """A decode node, a prefill node and a client of their router."""
    async with Site() as site:
        await site.start_all("p0")
        for running in site.nodes.values():
            assert isinstance(running.node, DecodeNode | PrefillNode)
            await running.tell(running.node.spec, None)
        async with router_of(site, model_dir) as client:
            yield site, client


async def scrapes(client: httpx.AsyncClient) -> dict[str, Scrape]:
    """By node, and ``router``."""
    texts = {"router": (await client.get("/metrics")).text}
    for target in (await client.get("/metrics/targets")).json():
        (address,) = target["targets"]
        answer = await client.get(f"http://{address}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        texts[target["labels"]["__meta_pdserve_node"]] = answer.text
    for text in texts.values():
        assert problems(text) == []
    return {name: Scrape(text) for name, text in texts.items()}
