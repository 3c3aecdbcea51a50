"""Answers by a grammar through a router and whole nodes, whatever happens on the way."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pdserve.core.config import DecodeConfig, RouterConfig
from router.server import Router, start_router
from router.service import RouterSpec
from tests.nodes.site import PATIENCE_S, Site
from tests.nodes.specs import MODEL
from tests.text.tiny_models import byte_level, save

PROMPT = [i * 7 % 60 for i in range(60)]
PATTERN = "[0-9]{20}-[A-F]{4,6}"  # of characters that are among the first tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


@asynccontextmanager
async def routed(
    site: Site, model_dir: Path, *, local_below: int
) -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    spec = RouterSpec(
        config=RouterConfig(http_port=0, grpc_port=0, local_prefill_below=local_below),
        served_name="tiny",
        model_dir=model_dir,
        model=MODEL,
        dtype="float32",
        max_model_len=None,
        headroom_tokens=8,
        prefill_configured="p0" in site.nodes,
        nodes=tuple(node.address for node in site.nodes.values()),
    )
    router = await start_router(spec)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", timeout=6 * PATIENCE_S, trust_env=False
        ) as client:
            await until_ready(site, client)
            yield router, client
    finally:
        await router.close(0.0)


async def until_ready(site: Site, client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(3 * PATIENCE_S):
        while (await client.get("/ready")).json()["status"] != "ready":
            await site.post.pause(0.05)


async def ask(client: httpx.AsyncClient, **fields: object) -> dict[str, object]:
    body = {"prompt": PROMPT, "guided_regex": PATTERN, "max_tokens": 60, "timeline": True}
    response = await client.post("/v1/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, object] = response.json()
    return answer


def check(answer: dict[str, object], *, num: int = 1) -> None:
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert len(choices) == num
    for choice in choices:
        assert re.fullmatch(PATTERN, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("local_below", "route"), [(0, "disaggregated"), (1000, "local")])
@pytest.mark.parametrize("depth", [1, 2])
async def test_answers_follow_it_on_both_routes(
    model_dir: Path, local_below: int, route: str, depth: int
) -> None:
    async with Site() as site:
        await site.start_all("p0", model_dir=model_dir, depth=depth)
        async with routed(site, model_dir, local_below=local_below) as (_, client):
            answers = await asyncio.gather(
                ask(client, n=3),
                ask(client, seed=1, logprobs=1),
                ask(client, seed=2, min_tokens=30, presence_penalty=0.5),
            )
            for answer, num in zip(answers, (3, 1, 1), strict=True):
                check(answer, num=num)
                timeline = answer["timeline"]
                assert isinstance(timeline, dict)
                assert timeline["route"] == route
            await site.until_free()


async def test_answers_without_one_are_what_they_were_beside_those_with_one(
    model_dir: Path,
) -> None:
    plain = {"guided_regex": None, "max_tokens": 30, "ignore_eos": True, "seed": 5}
    async with Site() as site:
        await site.start_all("p0", model_dir=model_dir)
        async with routed(site, model_dir, local_below=0) as (_, client):
            alone = await ask(client, **plain)
            beside, _ = await asyncio.gather(ask(client, **plain), ask(client, n=4))
            assert alone["choices"] == beside["choices"]


async def test_it_goes_on_where_it_was_on_another_start_of_its_node(model_dir: Path) -> None:
    """Tokens that the client has are not said again, and what follows keeps to the grammar."""
    async with Site(longest_s=0.1) as site:
        await site.start_all("p0", model_dir=model_dir)
        async with routed(site, model_dir, local_below=0) as (router, client):
            asking = asyncio.create_task(ask(client, return_token_ids=True))
            while site.decode.node.scheduler.num_running == 0:
                await site.post.pause(0.05)
            await site.post.pause(0.3)
            assert not asking.done()
            await site.kill("decode-0")
            await site.start_decode(model_dir=model_dir)
            site.decode.set_prefill_nodes((site.nodes["p0"].address,))
            router.set_nodes([node.address for node in site.nodes.values()])
            answer = await asking
            check(answer)
            timeline = answer["timeline"]
            assert isinstance(timeline, dict)
            assert timeline["num_attempts"] == 2


async def test_preempted_answers_go_on_where_they_were(model_dir: Path) -> None:
    config = DecodeConfig(
        max_num_seqs=8, max_num_batched_tokens=64, headroom_tokens=0, local_prefill_tokens=32
    )
    async with Site() as site:
        await site.start_decode(config, model_dir=model_dir, num_blocks=40)
        async with routed(site, model_dir, local_below=1000) as (_, client):
            calls = [ask(client, seed=seed, cache_salt=f"s{seed}") for seed in range(6)]
            answers = await asyncio.gather(*calls)
            for answer in answers:
                check(answer)
            assert site.decode.node.scheduler.num_preemptions > 0
            await site.until_free()


async def test_a_node_can_be_asked_only_when_its_compiler_is_made(
    model_dir: Path, tmp_path: Path
) -> None:
    """Making it would hold up whatever else the node does."""
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    async with Site() as site:
        starting = asyncio.create_task(site.start_decode(model_dir=tmp_path))
        await asyncio.wait([starting], timeout=0.5)
        assert not starting.done()
        await asyncio.to_thread((tmp_path / "tokenizer.json").write_text, text)
        await starting
        assert site.decode.address
