"""The text that Prometheus scrapes."""

import re
from dataclasses import replace

from pdserve.core.node import Role
from pdserve.core.request import FinishReason, RouteTaken
from router.admission import AdmissionReport, ClassQueue, Refusal
from router.metrics import Metrics
from tests.router.test_load_book import view

LINE = re.compile(
    r"# (HELP|TYPE) [a-z0-9_:]+ .+"
    r'|[a-z0-9_:]+(\{([a-z_]+="[^"]*",?)+\})? [0-9.e+-]+'
)

QUEUES = AdmissionReport(
    queues=(ClassQueue(prompt_class="short", num_waiting=2, max_queued=None, oldest_s=0.5),),
    refused={Refusal.CLASS_FULL: 4},
)


def test_every_line_is_of_the_text_format() -> None:
    metrics = Metrics()
    metrics.prompt_started(7)
    metrics.first_token_came(0.02)
    metrics.request_let_in(0.001)
    metrics.request_ended(0.5)
    metrics.request_failed("node_lost_error")
    text = metrics.expose([view("d0", Role.DECODE, running=3)], 1, QUEUES)
    for line in text.splitlines():
        assert LINE.fullmatch(line), line
    assert text.endswith("\n")


def test_counts_are_where_users_of_vllm_look_for_them() -> None:
    metrics = Metrics()
    metrics.routes[RouteTaken.DISAGGREGATED] += 2
    metrics.choice_finished(FinishReason.STOP)
    metrics.tokens_came(5)
    lines = metrics.expose([view("d0", Role.DECODE, running=3)], 1, QUEUES).splitlines()
    assert 'pdserve:routes_total{route="disaggregated"} 2' in lines
    assert 'pdserve:routes_total{route="fallback"} 0' in lines
    assert 'pdserve:request_success_total{finished_reason="stop"} 1' in lines
    assert "pdserve:generation_tokens_total 5" in lines
    assert 'pdserve:num_requests_queued{class="short"} 2' in lines
    assert 'pdserve:requests_refused_total{reason="class_full"} 4' in lines
    assert 'pdserve:num_requests_running{node="d0",role="decode"} 3' in lines


def test_each_node_counts_what_its_prefix_cache_was_asked_for_and_had() -> None:
    node = view("p0", Role.PREFILL)
    assert node.state is not None
    state = replace(node.state, prefix_cache_queries=100, prefix_cache_hits=64)
    lines = Metrics().expose([replace(node, state=state)], 0, QUEUES).splitlines()
    assert 'pdserve:prefix_cache_queries_total{node="p0",role="prefill"} 100' in lines
    assert 'pdserve:prefix_cache_hits_total{node="p0",role="prefill"} 64' in lines


def test_a_histogram_counts_up_to_each_bound() -> None:
    metrics = Metrics()
    for duration_s in (0.005, 0.006, 1000.0):
        metrics.first_token_came(duration_s)
    lines = metrics.expose([], 0, QUEUES).splitlines()
    name = "pdserve:time_to_first_token_seconds"
    assert f'{name}_bucket{{le="0.005"}} 1' in lines
    assert f'{name}_bucket{{le="0.01"}} 2' in lines
    assert f'{name}_bucket{{le="120.0"}} 2' in lines
    assert f'{name}_bucket{{le="+Inf"}} 3' in lines
    assert f"{name}_count 3" in lines
