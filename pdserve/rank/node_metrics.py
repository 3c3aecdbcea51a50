"""A node's own numbers, in the text format that Prometheus reads.

What the node tells routers is shown here as it is at the time of a scrape, under names that begin
with ``node_``: the router shows the same numbers, as it heard them, under vLLM's names.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from pdserve.core.node import NodeSpec, Role
from pdserve.core.timeline import Stage
from pdserve.rank.step_tally import StepTally
from pdserve.rpc.v1 import session_pb2
from pdserve.telemetry.exposition import Labels, family, histogram_family
from pdserve.telemetry.metrics_server import Expose, MetricsServer, start_metrics_server
from pdserve.telemetry.process_metrics import ProcessMetrics
from pdserve.telemetry.stage_times import StageTimes

OUTCOMES = ("finished", "aborted", "failed")
DIRECTIONS = {Role.PREFILL: "sent", Role.DECODE: "received"}


class NodeMetrics:
    """Counted by the node; ``stages`` are those that it does itself."""

    def __init__(self, spec: NodeSpec, stages: Iterable[str]) -> None:
        self._spec = spec
        self._labels: Labels = {"node": spec.name, "role": spec.role.value}
        self._stages = StageTimes(stages)
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._failed_handoffs: Counter[str] = Counter()
        self._process = ProcessMetrics()

    def request_over(self, stages: Iterable[Stage], outcome: str) -> None:
        self._stages.observe(stages)
        self._outcomes[outcome] += 1

    def handoff_failed(self, kind: str) -> None:
        self._failed_handoffs[kind] += 1

    def expose(self, status: session_pb2.NodeStatus, steps: StepTally) -> str:
        """All metrics, ready to be scraped."""
        lines = [
            *self._counts(),
            *self._status_lines(status),
            *steps.lines(self._labels),
            *self._process.lines(),
        ]
        return "\n".join(lines) + "\n"

    def _counts(self) -> Iterator[str]:
        labels = self._labels
        yield from histogram_family(
            "node_stage_duration_seconds",
            "Stages of requests that this node did, by its clock.",
            self._stages.samples(labels),
        )
        yield from family(
            "node_requests_total",
            "counter",
            "Requests (prefill nodes: prefills) that are over, by how they ended here.",
            [({**labels, "outcome": word}, count) for word, count in self._outcomes.items()],
        )
        yield from family(
            "pd_kv_transfer_failures_total",
            "counter",
            "Handoffs that failed here, by the kind of the error.",
            [({**labels, "kind": kind}, count) for kind, count in self._failed_handoffs.items()],
        )

    def _status_lines(self, status: session_pb2.NodeStatus) -> Iterator[str]:
        spec, labels = self._spec, self._labels
        info = {**labels, "incarnation": spec.incarnation, "transport": spec.transport}
        used = status.total_blocks - status.free_blocks
        waiting = {"waiting": status.waiting, "waiting_for_blocks": status.waiting_for_blocks}
        blocks = {"free": status.free_blocks, "used": used, "draining": status.draining_blocks}
        sequences = {"running": status.running, **waiting}
        moved = {**labels, "transport": spec.transport, "direction": DIRECTIONS[spec.role]}
        for name, kind, text, samples in (
            ("node_info", "gauge", "Which start of the node this is.", [(info, 1)]),
            ("node_serving", "gauge", "1: it takes work.", [(labels, int(status.ready))]),
            (
                "node_kv_blocks",
                "gauge",
                "KV blocks. Draining ones wait for their last writes, and are used too.",
                [({**labels, "state": word}, count) for word, count in blocks.items()],
            ),
            (
                "node_sequences",
                "gauge",
                "Sequences. Those that wait for blocks are among the waiting ones.",
                [({**labels, "state": word}, count) for word, count in sequences.items()],
            ),
            (
                "node_queued_prefill_tokens",
                "gauge",
                "Prompt tokens that wait.",
                [(labels, status.queued_prefill_tokens)],
            ),
            (
                "node_context_tokens",
                "gauge",
                "Tokens that a decode step of all running sequences attends to.",
                [(labels, status.context_tokens)],
            ),
            (
                "node_kv_transfer_bytes_total",
                "counter",
                "KV payload bytes, by what carried them.",
                [(moved, status.kv_bytes_moved)],
            ),
            (
                "node_preemptions_total",
                "counter",
                "Sequences that lost their blocks and were computed again.",
                [(labels, status.num_preemptions)],
            ),
            (
                "node_prefix_cache_queries_total",
                "counter",
                "Prompt tokens that were looked for in the prefix cache.",
                [(labels, status.prefix_cache_queries)],
            ),
            (
                "node_prefix_cache_hits_total",
                "counter",
                "Those of them whose KV was there.",
                [(labels, status.prefix_cache_hits)],
            ),
        ):
            yield from family(name, kind, text, samples)


async def serve_node_metrics(spec: NodeSpec, expose: Expose) -> MetricsServer | None:
    """The node's port for scrapes; None where it is to have none. Raises ConfigError."""
    if not spec.observability.node_metrics:
        return None
    return await start_metrics_server(spec.host, spec.port_range, expose)
