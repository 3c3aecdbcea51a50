"""Numbers about the router's work, in the text format that Prometheus reads.

Names follow vLLM's where the thing is the same. Owns counting and the format; what nodes report is
handed in at the time of a scrape.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from pdserve.core.breaker import BreakerState, Duty
from pdserve.core.request import FinishReason, RouteTaken
from router.admission import AdmissionReport
from router.exposition import Histogram, Labels, family, head
from router.nodes import NodeView
from router.routing_metrics import RoutingMetrics

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 120.0)
QUEUE_BOUNDS_S = (0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LATENCY_BOUNDS_S = (0.1, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class Metrics:
    """Counted by the dispatcher, read by the scrape and by the status."""

    def __init__(self) -> None:
        self.routes: Counter[RouteTaken] = Counter(dict.fromkeys(RouteTaken, 0))
        self.routing = RoutingMetrics()
        self.num_retries = 0
        self._finished: Counter[FinishReason] = Counter(dict.fromkeys(FinishReason, 0))
        self._failed: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._time_to_first_token = Histogram(TTFT_BOUNDS_S)
        self._latency = Histogram(LATENCY_BOUNDS_S)
        self._queue_time = Histogram(QUEUE_BOUNDS_S)

    def prompt_started(self, num_tokens: int) -> None:
        self._num_prompt_tokens += num_tokens

    def request_let_in(self, waited_s: float) -> None:
        self._queue_time.observe(waited_s)

    def tokens_came(self, num_tokens: int) -> None:
        self._num_generation_tokens += num_tokens

    def first_token_came(self, duration_s: float) -> None:
        self._time_to_first_token.observe(duration_s)

    def choice_finished(self, reason: FinishReason) -> None:
        self._finished[reason] += 1

    def request_failed(self, kind: str) -> None:
        self._failed[kind] += 1

    def request_ended(self, duration_s: float) -> None:
        self._latency.observe(duration_s)

    def expose(self, views: Iterable[NodeView], num_requests: int, queues: AdmissionReport) -> str:
        """All metrics, ready to be scraped."""
        lines = [
            *self._own_lines(num_requests),
            *self.routing.lines(),
            *_queue_lines(queues),
            *_node_lines(list(views)),
        ]
        return "\n".join(lines) + "\n"

    def _own_lines(self, num_requests: int) -> Iterator[str]:
        yield from family(
            "request_success_total",
            "counter",
            "Choices that ended, by reason.",
            [({"finished_reason": reason}, count) for reason, count in self._finished.items()],
        )
        yield from family(
            "request_failures_total",
            "counter",
            "Requests that ended with an error, by its kind.",
            [({"kind": kind}, count) for kind, count in self._failed.items()],
        )
        yield from family(
            "routes_total",
            "counter",
            "Prompts by where they were really prefilled.",
            [({"route": route}, count) for route, count in self.routes.items()],
        )
        for name, kind, text, value in (
            ("request_retries_total", "counter", "Legs submitted anew.", self.num_retries),
            ("prompt_tokens_total", "counter", "Prompt tokens let in.", self._num_prompt_tokens),
            (
                "generation_tokens_total",
                "counter",
                "Output tokens received.",
                self._num_generation_tokens,
            ),
            ("router_requests", "gauge", "Requests in work.", num_requests),
        ):
            yield from family(name, kind, text, [({}, value)])
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self._time_to_first_token),
            ("request_queue_time_seconds", "Waiting at the router.", self._queue_time),
            ("e2e_request_latency_seconds", "Arrival to last token.", self._latency),
        ):
            yield from head(name, "histogram", text)
            yield from histogram.lines(f"pdserve:{name}")


def _queue_lines(report: AdmissionReport) -> Iterator[str]:
    yield from family(
        "num_requests_queued",
        "gauge",
        "Requests that wait at the router, by prompt class.",
        [({"class": queue.prompt_class}, queue.num_waiting) for queue in report.queues],
    )
    yield from family(
        "requests_refused_total",
        "counter",
        "Requests that were refused or dropped before any work, by reason.",
        [({"reason": reason}, count) for reason, count in report.refused.items()],
    )


def _node_lines(views: list[NodeView]) -> Iterator[str]:
    yield from family(
        "node_ready",
        "gauge",
        "1: the node is connected and ready.",
        [({"node": view.name, "role": view.role}, int(view.ready)) for view in views],
    )
    yield from family(
        "node_breaker_open",
        "gauge",
        "1: it failed again and again at this stage, and is left alone for a while.",
        [*map(_breaker_sample, views), *_trouble_samples(views)],
    )
    states = [
        ({"node": view.name, "role": view.role.value}, view.state) for view in views if view.state
    ]
    for name, kind, text, values in (
        (
            "num_requests_running",
            "gauge",
            "Sequences in work on the node.",
            [state.running for _, state in states],
        ),
        (
            "num_requests_waiting",
            "gauge",
            "Sequences waiting on the node.",
            [state.waiting for _, state in states],
        ),
        (
            "kv_cache_usage_perc",
            "gauge",
            "Used share of the node's KV blocks, 0 to 1.",
            [1 - state.free_blocks / max(state.total_blocks, 1) for _, state in states],
        ),
        (
            "num_preemptions_total",
            "counter",
            "Sequences that lost their blocks and were computed again.",
            [state.num_preemptions for _, state in states],
        ),
        (
            "pd_kv_transfer_bytes_total",
            "counter",
            "KV payload bytes that the node sent or received.",
            [state.kv_bytes_moved for _, state in states],
        ),
        (
            "prefix_cache_queries_total",
            "counter",
            "Prompt tokens that were looked for in the node's prefix cache.",
            [state.prefix_cache_queries for _, state in states],
        ),
        (
            "prefix_cache_hits_total",
            "counter",
            "Those of them whose KV was there.",
            [state.prefix_cache_hits for _, state in states],
        ),
    ):
        labels = [label for label, _ in states]
        yield from family(name, kind, text, list(zip(labels, values, strict=True)))


def _breaker_sample(view: NodeView) -> tuple[Labels, int]:
    is_open = view.breaker is not BreakerState.CLOSED
    return {"node": view.name, "stage": Duty.DECODE.value, "seen_by": "router"}, int(is_open)


def _trouble_samples(views: Iterable[NodeView]) -> Iterator[tuple[Labels, int]]:
    for view in views:
        for trouble in view.state.troubles if view.state else ():
            labels = {"node": trouble.node, "stage": trouble.stage.value, "seen_by": view.name}
            yield labels, 1
