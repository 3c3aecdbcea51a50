"""What a prefill node counts, logs and traces of its prefills. Decides nothing."""

import logging
from collections.abc import Sequence

from pdserve.core.clock import Clock
from pdserve.core.node import NodeSpec
from pdserve.core.request import HandoffId
from pdserve.core.timeline import Stage
from pdserve.rank.node_metrics import NodeMetrics
from pdserve.telemetry.traces import Span, Tracer

logger = logging.getLogger(__name__)

STAGES = ("prefill_queue", "prefill")


class Observer:
    """``begun`` and ``ended`` once for each prefill."""

    def __init__(self, spec: NodeSpec, tracer: Tracer | None, clock: Clock) -> None:
        self.metrics = NodeMetrics(spec, STAGES)
        self._node = spec.name
        self._tracer = tracer
        self._clock = clock

    def begun(self, handoff: HandoffId, num_tokens: int, traceparent: str | None) -> Span | None:
        """The prefill's span; None: requests are not traced."""
        if self._tracer is None:
            return None
        return self._tracer.start(
            "prefill_node",
            parent=traceparent,
            start_s=self._clock.now_s(),
            attributes={
                "pdserve.request_id": handoff.request_id,
                "pdserve.attempt": handoff.attempt,
                "pdserve.leg": handoff.leg,
                "pdserve.node": self._node,
                "gen_ai.usage.input_tokens": num_tokens,
            },
        )

    def computed(self, span: Span | None, *, queue_s: float, prefill_s: float) -> None:
        """The first tokens are known."""
        if span is not None:
            now_s = self._clock.now_s()
            begun_s = now_s - prefill_s
            span.stage("prefill_queue", start_s=begun_s - queue_s, end_s=begun_s)
            span.stage("prefill", start_s=begun_s, end_s=now_s)

    def ended(
        self,
        handoff: HandoffId,
        span: Span | None,
        times_s: Sequence[float] | None,
        error: str | None,
    ) -> None:
        """``times_s``: of the stages, if it was computed. ``error``: its kind, or ``aborted``."""
        stages = [
            Stage(name=name, node=self._node, duration_s=time_s)
            for name, time_s in zip(STAGES, times_s or (), strict=False)
        ]
        failed = "aborted" if error == "aborted" else "failed"
        self.metrics.request_over(stages, failed if error else "finished")
        told = {"request_id": handoff.request_id, "attempt": handoff.attempt, "error": error}
        line = "prefill for request %s over: %s"
        logger.info(line, handoff.request_id, error or "finished", extra=told)
        if span is not None:
            span.end(end_s=self._clock.now_s(), attributes={}, error=error)
