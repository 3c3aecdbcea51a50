"""The router's span of a request: begun when it is taken in, ended with how it went.

It is the parent of what the nodes do, and a child of the client's span, if that sent one.
"""

from dataclasses import replace

from pdserve.telemetry.traces import Span, Tracer
from router.legs import Job
from router.record import ROUTER, RequestRecord


class RequestSpans:
    """``tracer`` None: nothing is traced."""

    def __init__(self, tracer: Tracer | None, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def begin(
        self, request_id: str, job: Job, parent: str | None, arrived_s: float
    ) -> tuple[Span | None, Job]:
        """The span, and the job as a part of it. ``parent``: the client's traceparent."""
        if self._tracer is None:
            return None, job
        span = self._tracer.start(
            "router",
            parent=parent,
            start_s=arrived_s,
            attributes={
                "pdserve.request_id": request_id,
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": job.sampling.max_tokens,
                "gen_ai.request.choice.count": job.num_choices,
                "gen_ai.usage.input_tokens": len(job.prompt_ids),
            },
        )
        return span, replace(job, traceparent=span.traceparent)

    def end(self, span: Span | None, record: RequestRecord) -> None:
        """With the router's own stages; the nodes tell of theirs themselves."""
        if span is None:
            return
        attributes: dict[str, str | int | float] = {
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "pdserve.attempts": record.num_attempts,
        }
        if record.ttft_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
        if (timeline := record.timeline) is not None:
            attributes["pdserve.route"] = timeline.route.value
            attributes["pdserve.kv_bytes"] = timeline.kv_bytes
            attributes["pdserve.cached_tokens"] = timeline.cached_tokens
            start_s = record.arrived_s
            for stage in (stage for stage in timeline.stages if stage.node == ROUTER):
                span.stage(stage.name, start_s=start_s, end_s=start_s + stage.duration_s)
                start_s += stage.duration_s
        if record.first_token_s is not None:
            span.stage("streaming", start_s=record.first_token_s, end_s=record.ended_s)
        span.end(end_s=record.ended_s, attributes=attributes, error=record.error)


NO_SPANS = RequestSpans(None, "")
