"""A real cluster under load: its metrics, traces and logs hold what the load generator saw."""

import asyncio
import bisect
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.bench.load import Outcome, Target, run_load
from pdserve.bench.workload import Arrival
from router.metrics import TTFT_BOUNDS_S
from tests.cluster.conftest import LOCAL_BELOW
from tests.cluster.served import Served, served
from tests.telemetry.otlp_receiver import OtlpReceiver, Received
from tests.telemetry.scrape import Scrape, problems

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
OUTPUT_LEN = 8
PROMPT_LENS = [LOCAL_BELOW // 2, 2 * LOCAL_BELOW, 100] * 4
SECRET = "The captain's word is xyzzy."


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


@pytest.fixture(scope="module")
def observed(receiver: OtlpReceiver) -> Iterator[Served]:
    settings = {"observability.log_format": "json", "observability.tracing": "true"}
    with served({"router.local_prefill_below": LOCAL_BELOW, **settings}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def outcomes(observed: Served) -> list[Outcome]:
    """Of a load whose answers were all good."""
    workload = [
        Arrival(index=i, arrival_s=0.2 * i, prompt_len=length, output_len=OUTPUT_LEN)
        for i, length in enumerate(PROMPT_LENS)
    ]
    target = Target(url=observed.http_url, model=MODEL, vocab_size=49152)
    outcomes = asyncio.run(run_load(target, workload))
    assert not [outcome.error for outcome in outcomes if outcome.error]
    observed.wait_until_idle()
    return outcomes


def scrapes(cluster: Served) -> dict[str, Scrape]:
    """By node, and ``router``."""
    with httpx.Client(base_url=cluster.http_url, trust_env=False) as client:
        texts = {"router": client.get("/metrics").text}
        for target in client.get("/metrics/targets").json():
            name = target["labels"]["__meta_pdserve_node"]
            texts[name] = client.get(f"http://{target['targets'][0]}/metrics").text
    for text in texts.values():
        assert problems(text) == []
    return {name: Scrape(text) for name, text in texts.items()}


def test_metrics_agree_with_the_load_generator(observed: Served, outcomes: list[Outcome]) -> None:
    seen = scrapes(observed)
    router, decode, prefill = seen["router"], seen["decode-0"], seen["prefill-0"]
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    num_local = sum(length < LOCAL_BELOW for length in PROMPT_LENS)
    assert router.value("e2e_request_latency_seconds_count") == len(outcomes)
    assert router.value("generation_tokens_total") == num_tokens == len(outcomes) * OUTPUT_LEN
    assert router.value("prompt_tokens_total") == sum(PROMPT_LENS)
    assert router.value("routes_total", route="local") == num_local
    assert router.value("routes_total", route="disaggregated") == len(outcomes) - num_local
    assert decode.value("node_requests_total", outcome="finished") == len(outcomes)
    assert prefill.value("node_requests_total", outcome="finished") == len(outcomes) - num_local
    received = decode.value("node_kv_transfer_bytes_total", direction="received")
    assert received == prefill.value("node_kv_transfer_bytes_total", direction="sent") > 0
    stages = "request_stage_duration_seconds_count"
    assert router.value(stages, stage="transfer") == len(outcomes) - num_local


def test_first_tokens_are_in_the_buckets_that_their_clients_saw(
    observed: Served, outcomes: list[Outcome]
) -> None:
    """The median of both lies in the same bucket or the next: the client's way is longer."""
    buckets = scrapes(observed)["router"].buckets("time_to_first_token_seconds")
    middle = len(outcomes) // 2
    seen_by_router = next(i for i, (_, count) in enumerate(buckets) if count > middle)
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    seen_by_client = bisect.bisect_left(TTFT_BOUNDS_S, statistics.median_high(ttfts))
    assert seen_by_router <= seen_by_client <= seen_by_router + 1


def test_a_request_is_one_trace_across_the_processes(
    observed: Served, receiver: OtlpReceiver
) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with httpx.Client(base_url=observed.http_url, timeout=120, trust_env=False) as client:
        body = {"model": MODEL, "prompt": list(range(200, 290)), "max_tokens": 3}
        headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    asyncio.run(_until(lambda: len(_of(receiver, trace_id)) >= 3))
    spans = {span.name: span for span in _of(receiver, trace_id)}
    router, decode, prefill = (spans[n] for n in ("router", "decode_node", "prefill_node"))
    assert [span.process for span in (router, decode, prefill)] == [
        "router",
        "decode-0",
        "prefill-0",
    ]
    assert (decode.parent_id, prefill.parent_id) == (router.span_id, decode.span_id)


def test_logs_name_each_request_and_hold_no_prompt(observed: Served) -> None:
    answer = observed.post("/v1/completions", {"model": MODEL, "prompt": SECRET, "max_tokens": 2})
    observed.wait_until_idle()
    line = next(line for line in observed.lines if line.startswith("logs"))
    directory = Path(line.split(maxsplit=1)[1])
    lines = {name: _lines(directory / f"{name}.log") for name in ("router", "decode-0")}
    ids = [{line.get("request_id") for line in found} - {None} for found in lines.values()]
    assert ids[0] == ids[1] != set()
    last = [line for line in lines["router"] if line.get("output_tokens") == 2][-1]
    assert last["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    for path in directory.glob("*.log"):
        assert "xyzzy" not in path.read_text()


def _of(receiver: OtlpReceiver, trace_id: str) -> list[Received]:
    names = ("router", "decode_node", "prefill_node")
    return [span for span in receiver.spans if span.trace_id == trace_id and span.name in names]


async def _until(is_so: Any) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.1)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Those of this run: the file may hold older ones, of other formats."""
    texts = path.read_text().splitlines()
    starts = [i for i, text in enumerate(texts) if '"serves at' in text or '"HTTP on' in text]
    recent = texts[starts[-1] :] if starts else texts
    return [json.loads(text) for text in recent if text.startswith("{")]
