"""The text that Prometheus scrapes of the router."""

from dataclasses import replace

import pytest

from pdserve.core.node import Role
from pdserve.core.request import FinishReason, RouteTaken
from pdserve.core.timeline import STAGE_NAMES, Stage, Timeline
from router.admission import AdmissionReport, ClassQueue, Refusal
from router.metrics import Metrics, Now
from router.nodes import NodeView
from router.record import RequestRecord
from tests.router.test_load_book import view
from tests.telemetry.scrape import Scrape, problems

QUEUES = AdmissionReport(
    queues=(ClassQueue(prompt_class="short", num_waiting=2, max_queued=None, oldest_s=0.5),),
    refused={Refusal.CLASS_FULL: 4},
)
STAGES = (
    Stage(name="admission", node="router", duration_s=0.001),
    Stage(name="prefill", node="p0", duration_s=0.3),
    Stage(name="prefill", node="d0", duration_s=0.4),  # the first handoff failed
    Stage(name="transfer", node="d0", duration_s=0.02),
)
TIMELINE = Timeline(route=RouteTaken.DISAGGREGATED, stages=STAGES, kv_bytes=1, transport="grpc")
RECORD = RequestRecord(
    request_id="r",
    arrived_s=100.0,
    ended_s=102.5,
    first_token_s=100.5,
    num_prompt_tokens=300,
    num_output_tokens=20,
    num_choices=1,
    num_attempts=1,
    planned=RouteTaken.DISAGGREGATED,
    timeline=TIMELINE,
    error=None,
)


def now(*views: NodeView) -> Now:
    return Now(
        views=views,
        num_requests=1,
        queues=QUEUES,
        ready=True,
        headroom_blocks={"d0": 40},
        model='a "model"',
        version="1",
    )


def scrape(metrics: Metrics, *views: NodeView) -> Scrape:
    return Scrape(metrics.expose(now(*views)))


def busy() -> Metrics:
    metrics = Metrics()
    metrics.prompt_started(7)
    metrics.first_token_came(0.02)
    metrics.gap_seen(0.03)
    metrics.request_let_in(0.001)
    metrics.request_ended(RECORD)
    metrics.request_ended(replace(RECORD, error="node_lost_error", timeline=None))
    return metrics


@pytest.mark.parametrize("metrics", [Metrics(), busy()])
@pytest.mark.parametrize("views", [(), (view("d0", Role.DECODE), view("p0", Role.PREFILL))])
def test_prometheus_finds_nothing_wrong(metrics: Metrics, views: tuple[NodeView, ...]) -> None:
    assert problems(metrics.expose(now(*views))) == []


def test_counts_are_where_users_of_vllm_look_for_them() -> None:
    metrics = Metrics()
    metrics.routes[RouteTaken.DISAGGREGATED] += 2
    metrics.choice_finished(FinishReason.STOP)
    metrics.tokens_came(5)
    seen = scrape(metrics, view("d0", Role.DECODE, running=3))
    assert seen.value("routes_total", route="disaggregated") == 2
    assert seen.value("routes_total", route="fallback") == 0
    assert seen.value("request_success_total", finished_reason="stop") == 1
    assert seen.value("generation_tokens_total") == 5
    assert seen.value("num_requests_queued", **{"class": "short"}) == 2
    assert seen.value("queue_oldest_seconds", **{"class": "short"}) == 0.5
    assert seen.value("requests_refused_total", reason="class_full") == 4
    assert seen.value("num_requests_running", node="d0", role="decode") == 3
    assert seen.value("kv_headroom_blocks", node="d0") == 40
    assert seen.value("kv_blocks", node="d0", state="used") == 10
    assert seen.value("build_info", model='a "model"', version="1") == 1


def test_each_node_counts_what_its_prefix_cache_was_asked_for_and_had() -> None:
    node = view("p0", Role.PREFILL)
    assert node.state is not None
    state = replace(node.state, prefix_cache_queries=100, prefix_cache_hits=64)
    seen = scrape(Metrics(), replace(node, state=state))
    assert seen.value("prefix_cache_queries_total", node="p0") == 100
    assert seen.value("prefix_cache_hits_total", node="p0") == 64


def test_kv_bytes_are_counted_by_what_carried_them() -> None:
    node = view("p0", Role.PREFILL)
    assert node.state is not None
    node = replace(node, transport="nccl", state=replace(node.state, kv_bytes_moved=7))
    seen = scrape(Metrics(), node, view("d0", Role.DECODE))
    assert seen.value("pd_kv_transfer_bytes_total", node="p0", transport="nccl") == 7
    assert seen.value("pd_kv_transfer_bytes_total", node="d0", transport="unknown") == 0


def test_a_request_that_is_over_has_its_stages_counted_each_once() -> None:
    seen = scrape(busy())
    counts = {n: seen.value("request_stage_duration_seconds_count", stage=n) for n in STAGE_NAMES}
    assert {name for name, count in counts.items() if count} == {"admission", "prefill", "transfer"}
    assert seen.value("request_prefill_time_seconds_sum") == pytest.approx(0.7)
    assert seen.value("pd_kv_transfer_duration_seconds_sum") == pytest.approx(0.02)
    assert seen.value("e2e_request_latency_seconds_count") == 2
    assert seen.value("request_decode_time_seconds_sum") == pytest.approx(4.0)
    assert seen.value("request_failures_total", kind="node_lost_error") == 1
    assert seen.value("request_prompt_tokens_sum") == 600
    assert seen.value("inter_token_latency_seconds_count") == 1


def test_a_histogram_counts_up_to_each_bound() -> None:
    metrics = Metrics()
    for duration_s in (0.005, 0.006, 1000.0):
        metrics.first_token_came(duration_s)
    buckets = dict(scrape(metrics).buckets("time_to_first_token_seconds"))
    assert (buckets[0.005], buckets[0.01], buckets[120.0], buckets[float("inf")]) == (1, 2, 2, 3)
