"""What nodes tell Prometheus of themselves, beside what their router tells of them."""

import asyncio
from pathlib import Path

import pytest

from pdserve.core.errors import RankError
from tests.nodes.scraped import scraped_site, scrapes
from tests.nodes.test_behind_a_router import PROMPT, ask
from tests.text.tiny_models import byte_level, save

NUM_REQUESTS, OUTPUT_LEN = 3, 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())


async def test_every_node_is_found_by_the_router_and_counts_what_it_did(model_dir: Path) -> None:
    async with scraped_site(model_dir) as (site, client):
        for seed in range(NUM_REQUESTS):
            answer = await ask(client, max_tokens=OUTPUT_LEN, user=str(seed))
            assert answer.status_code == 200
        await site.until_free()
        seen = await scrapes(client)
    assert seen.keys() == {"router", "decode-0", "p0"}
    decode, prefill = seen["decode-0"], seen["p0"]
    for node in (decode, prefill):
        assert node.value("node_requests_total", outcome="finished") == NUM_REQUESTS
        assert node.value("node_requests_total") == NUM_REQUESTS
        assert node.value("node_serving") == 1
        assert node.value("node_kv_blocks", state="used") == 0
    for stage in ("reserve", "transfer", "decode_queue", "first_decode"):
        assert decode.value("node_stage_duration_seconds_count", stage=stage) == NUM_REQUESTS
    assert decode.value("node_stage_duration_seconds_count", stage="prefill") == 0
    assert prefill.value("node_stage_duration_seconds_count", stage="prefill") == NUM_REQUESTS
    sent = prefill.value("node_kv_transfer_bytes_total", direction="sent")
    received = decode.value("node_kv_transfer_bytes_total", direction="received")
    assert sent == received > 0
    decoded = decode.value("node_step_tokens_total", kind="decode")
    assert decoded >= NUM_REQUESTS * (OUTPUT_LEN - 1)
    assert prefill.value("node_step_tokens_total", kind="prompt") >= len(PROMPT)
    assert prefill.value("node_step_duration_seconds_count", kind="prefill") > 0


async def test_no_series_is_told_twice(model_dir: Path) -> None:
    """A sum over all that is scraped counts each thing once."""
    async with scraped_site(model_dir) as (_, client):
        await ask(client, max_tokens=OUTPUT_LEN)
        seen = await scrapes(client)
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for scrape in seen.values()
        for sample in scrape.samples
        if sample.name.startswith("pdserve:")
    ]
    assert len(series) == len(set(series))
    router = {name for name, _ in series if not name.startswith("pdserve:node_")}
    assert {sample.name for sample in seen["router"].samples} >= {
        name for name in router if name != "pdserve:pd_kv_transfer_failures_total"
    }


async def test_a_node_that_ends_gives_its_port_back(model_dir: Path) -> None:
    async with scraped_site(model_dir) as (site, client):
        address = site.nodes["p0"].address.metrics_address
        assert (await client.get(f"http://{address}/metrics")).status_code == 200
        site.ranks["p0"].fail(RankError("killed"))
        await site.nodes.pop("p0").close(0)
        host, port = str(address).split(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))


async def test_what_ends_early_is_counted_as_that(model_dir: Path) -> None:
    async with scraped_site(model_dir) as (site, client):
        call = ask(client, max_tokens=136)
        while not site.decode.node.scheduler.num_running:
            await site.post.pause(0.02)
        call.cancel()
        await site.until_free()
        seen = await scrapes(client)
    assert seen["decode-0"].value("node_requests_total", outcome="aborted") == 1
    assert seen["decode-0"].value("node_requests_total") == 1
