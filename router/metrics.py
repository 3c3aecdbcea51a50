"""Numbers about the router's work, in the text format that Prometheus reads.

Names follow vLLM's where the thing is the same. Owns what is counted here, and what the live page
shows of the near past; what nodes report is handed in at the time of a scrape.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pdserve.core.request import FinishReason, RouteTaken
from pdserve.core.timeline import STAGE_NAMES
from pdserve.telemetry.exposition import NO_LABELS, Histogram, family, histogram_family
from pdserve.telemetry.process_metrics import ProcessMetrics
from router.admission import AdmissionReport
from router.node_families import node_lines
from router.nodes import NodeView
from router.recent import NUM_REQUESTS, NUM_SAMPLES, Ring, Sample
from router.record import RequestRecord
from router.routing_metrics import RoutingMetrics

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 120.0)
GAP_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 10.0)
QUEUE_BOUNDS_S = (0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LATENCY_BOUNDS_S = (0.1, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
STAGE_BOUNDS_S = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0)
LENGTH_BOUNDS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What is so at the time of a scrape."""

    views: tuple[NodeView, ...]
    num_requests: int
    queues: AdmissionReport
    ready: bool
    headroom_blocks: Mapping[str, int]  # of each decode node
    model: str
    version: str


class Metrics:
    """Counted by the dispatcher, read by the scrape and by the status."""

    def __init__(self) -> None:
        self.routes: Counter[RouteTaken] = Counter(dict.fromkeys(RouteTaken, 0))
        self.routing = RoutingMetrics()
        self.num_retries = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_ended = 0
        self.recent: Ring[RequestRecord] = Ring(NUM_REQUESTS)
        self.samples: Ring[Sample] = Ring(NUM_SAMPLES)
        self._finished: Counter[FinishReason] = Counter(dict.fromkeys(FinishReason, 0))
        self._failed: Counter[str] = Counter()
        self._process = ProcessMetrics()
        self._ttft = Histogram(TTFT_BOUNDS_S)
        self._gaps = Histogram(GAP_BOUNDS_S)
        self._latency = Histogram(LATENCY_BOUNDS_S)
        self._queue_time = Histogram(QUEUE_BOUNDS_S)
        self._decode_time = Histogram(LATENCY_BOUNDS_S)
        self._prompt_lens = Histogram(LENGTH_BOUNDS)
        self._output_lens = Histogram(LENGTH_BOUNDS)
        self._stages = {name: Histogram(STAGE_BOUNDS_S) for name in STAGE_NAMES}

    def prompt_started(self, num_tokens: int) -> None:
        self.num_prompt_tokens += num_tokens

    def request_let_in(self, waited_s: float) -> None:
        self._queue_time.observe(waited_s)

    def tokens_came(self, num_tokens: int) -> None:
        self.num_generation_tokens += num_tokens

    def first_token_came(self, duration_s: float) -> None:
        self._ttft.observe(duration_s)

    def gap_seen(self, duration_s: float) -> None:
        """Between two outputs of one choice, as they came from the node."""
        self._gaps.observe(duration_s)

    def choice_finished(self, reason: FinishReason) -> None:
        self._finished[reason] += 1

    def request_ended(self, record: RequestRecord) -> None:
        self.num_ended += 1
        self.recent.add(record)
        self._latency.observe(record.latency_s)
        self._prompt_lens.observe(record.num_prompt_tokens)
        self._output_lens.observe(record.num_output_tokens)
        if record.error is not None:
            self._failed[record.error] += 1
        if record.first_token_s is not None:
            self._decode_time.observe(record.ended_s - record.first_token_s)
        if record.timeline is not None:
            durations_s: defaultdict[str, float] = defaultdict(float)
            for stage in record.timeline.stages:  # what had to be done twice is there twice
                durations_s[stage.name] += stage.duration_s
            for name, duration_s in durations_s.items():
                self._stages[name].observe(duration_s)

    def expose(self, now: Now) -> str:
        """All metrics, ready to be scraped."""
        lines = [
            *self._counts(),
            *self._histograms(),
            *self.routing.lines(),
            *_now_lines(now),
            *node_lines(now.views, now.headroom_blocks),
            *self._process.lines(),
        ]
        return "\n".join(lines) + "\n"

    def _counts(self) -> Iterator[str]:
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
        for name, text, value in (
            ("request_retries_total", "Legs submitted anew.", self.num_retries),
            ("prompt_tokens_total", "Prompt tokens let in.", self.num_prompt_tokens),
            ("generation_tokens_total", "Output tokens received.", self.num_generation_tokens),
        ):
            yield from family(name, "counter", text, [(NO_LABELS, value)])

    def _histograms(self) -> Iterator[str]:
        stages = self._stages
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self._ttft),
            ("inter_token_latency_seconds", "Between outputs of a choice.", self._gaps),
            ("e2e_request_latency_seconds", "Arrival to last token.", self._latency),
            ("request_queue_time_seconds", "Waiting at the router.", self._queue_time),
            ("request_prefill_time_seconds", "Prefill, wherever it was.", stages["prefill"]),
            ("request_decode_time_seconds", "First token to the end.", self._decode_time),
            (
                "pd_kv_transfer_duration_seconds",
                "First token known to all KV blocks in.",
                stages["transfer"],
            ),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._prompt_lens),
            ("request_generation_tokens", "Output tokens of a request.", self._output_lens),
        ):
            yield from histogram_family(name, text, [(NO_LABELS, histogram)])
        yield from histogram_family(
            "request_stage_duration_seconds",
            "Requests' stages, each by the clock of the process that did it.",
            [({"stage": name}, histogram) for name, histogram in stages.items()],
        )


def _now_lines(now: Now) -> Iterator[str]:
    build = {"version": now.version, "model": now.model}
    queues = now.queues.queues
    for name, kind, text, samples in (
        ("build_info", "gauge", "What runs here.", [(build, 1.0)]),
        ("router_ready", "gauge", "1: takes requests.", [(NO_LABELS, int(now.ready))]),
        ("router_requests", "gauge", "Requests in work.", [(NO_LABELS, now.num_requests)]),
        (
            "num_requests_queued",
            "gauge",
            "Requests that wait at the router, by prompt class.",
            [({"class": queue.prompt_class}, queue.num_waiting) for queue in queues],
        ),
        (
            "queue_oldest_seconds",
            "gauge",
            "How long the oldest of them has waited.",
            [({"class": queue.prompt_class}, queue.oldest_s) for queue in queues],
        ),
        (
            "requests_refused_total",
            "counter",
            "Requests that were refused or dropped before any work, by reason.",
            [({"reason": reason}, count) for reason, count in now.queues.refused.items()],
        ),
    ):
        yield from family(name, kind, text, samples)
