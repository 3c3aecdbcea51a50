"""One request that is not over: what is known of it beyond what ``delivery.py`` decides on."""

import asyncio
from dataclasses import dataclass, field, replace

from pdserve.core.errors import PdserveError, RequestTimeoutError
from pdserve.core.timeline import Stage, Timeline
from pdserve.telemetry.traces import Span
from router.delivery import Delivery, StartLeg
from router.inbox import Inbox, RequestOver
from router.legs import Job, Leg
from router.record import ROUTER, RequestRecord


@dataclass(slots=True, kw_only=True)
class Running:
    request_id: str
    job: Job
    prompt: int  # its number within the call
    inbox: Inbox
    label: str
    tenant: str  # whose it is
    delivery: Delivery
    arrived_s: float
    queued_s: float  # from then on it waited to be let in
    deadline: asyncio.TimerHandle
    span: Span | None = None  # None: it is not traced
    submitted_s: float | None = None
    first_token_s: float | None = None
    legs: dict[int, Leg] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()  # nodes that failed this request
    latest: Leg | None = None  # the leg that began last
    num_attempts: int = 0
    num_tokens: int = 0
    last_output_s: dict[int, float] = field(default_factory=dict)  # of each choice that goes on
    timeline: Timeline | None = None
    cached_tokens: int = 0  # of the prompt, when its first leg read it
    error: PdserveError | None = None

    def told(self, timeline: Timeline) -> None:
        """A node has told the stages. What later legs find cached is this request's own work."""
        if self.timeline is None:
            self.cached_tokens = timeline.cached_tokens
        self.timeline = timeline

    def took_too_long(self, limit_s: float) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"not over within request_timeout_s = {limit_s:g} s; {self.num_tokens} tokens had come"
        )

    def over(self) -> RequestOver:
        """The news that this was all."""
        return RequestOver(
            error=self.error,
            timeline=self._whole_timeline(),
            planned=self.latest.plan.route if self.latest else None,
            explain=self._explain(),
            num_attempts=self.num_attempts,
            cached_tokens=self.cached_tokens,
        )

    def record(self, now_s: float) -> RequestRecord:
        """How it went, once it is over."""
        return RequestRecord(
            request_id=self.request_id,
            arrived_s=self.arrived_s,
            ended_s=now_s,
            first_token_s=self.first_token_s,
            num_prompt_tokens=len(self.job.prompt_ids),
            num_output_tokens=self.num_tokens,
            num_choices=self.job.num_choices,
            num_attempts=self.num_attempts,
            planned=self.latest.plan.route if self.latest else None,
            timeline=self._whole_timeline(),
            error=self.error.kind if self.error else None,
        )

    def summary(self, now_s: float) -> str:
        """The one line that the log has of a request."""
        label = f" ({self.label})" if self.label else ""
        route = self.timeline.route if self.timeline else "unknown"
        return (
            f"request {self.request_id}{label} over after {now_s - self.arrived_s:.3f} s: "
            f"{len(self.job.prompt_ids)} prompt tokens, {self.num_tokens} output tokens, "
            f"route {route}"
            + (f", {self.error}" if self.error else "")
            + (f"; {explain}" if (explain := self._explain()) else "")
        )

    def _explain(self) -> str:
        return self.latest.plan.told(self.latest.timeline) if self.latest else ""

    def _whole_timeline(self) -> Timeline | None:
        """The node's timeline with the router's own stages before it."""
        if self.timeline is None or self.submitted_s is None:
            return None
        own = (
            Stage(name="admission", node=ROUTER, duration_s=self.queued_s - self.arrived_s),
            Stage(name="router_queue", node=ROUTER, duration_s=self.submitted_s - self.queued_s),
        )
        stages = (*own, *self.timeline.stages)
        return replace(self.timeline, stages=stages, cached_tokens=self.cached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A leg that waits for a decode node to be ready."""

    running: Running
    start: StartLeg
    deadline: asyncio.TimerHandle
