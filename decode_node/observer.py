"""What a decode node counts, logs and traces of its requests. Decides nothing."""

import logging

from decode_node.requests import RequestState
from pdserve.core.clock import Clock
from pdserve.core.node import NodeSpec
from pdserve.core.request import Request
from pdserve.rank.node_metrics import NodeMetrics
from pdserve.telemetry.traces import Span, Tracer

logger = logging.getLogger(__name__)

STAGES = ("reserve", "prefill", "transfer", "decode_queue", "first_decode")


class Observer:
    """``begun`` and ``ended`` once for each request."""

    def __init__(self, spec: NodeSpec, tracer: Tracer | None, clock: Clock) -> None:
        self.metrics = NodeMetrics(spec, STAGES)
        self._node = spec.name
        self._tracer = tracer
        self._clock = clock

    def begun(self, request: Request) -> Span | None:
        """The request's span here; None: requests are not traced."""
        if self._tracer is None:
            return None
        return self._tracer.start(
            "decode_node",
            parent=request.traceparent,
            start_s=self._clock.now_s(),
            attributes={
                "pdserve.request_id": request.request_id,
                "pdserve.attempt": request.attempt,
                "pdserve.node": self._node,
                "gen_ai.usage.input_tokens": request.prompt_len,
            },
        )

    def ended(self, state: RequestState, error: str | None = None) -> None:
        """``error``: its kind; ``aborted`` where nobody wants it any more."""
        timed = state.timing.timed()
        own = [(stage, end_s) for stage, end_s in timed if stage.node == self._node]
        failed = "aborted" if error == "aborted" else "failed"
        self.metrics.request_over([stage for stage, _ in own], failed if error else "finished")
        request_id, attempt = state.request.key
        told = {"request_id": request_id, "attempt": attempt, "error": error}
        logger.info("request %s over: %s", request_id, error or "finished", extra=told)
        if (span := state.span) is None:
            return
        for stage, end_s in own:
            span.stage(stage.name, start_s=end_s - stage.duration_s, end_s=end_s)
        span.end(end_s=self._clock.now_s(), attributes={}, error=error)
