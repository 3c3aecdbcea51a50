"""Owns the running requests: starts them, follows them, ends them.

One task reads what the nodes say; it and the calls below run on the same event loop, and nothing
here waits for a client: what came for it lies in its inbox. Which outputs may be believed and when
a leg is started anew is decided by ``delivery.py``. Text and HTTP are unknown here: a call gives
token ids and gets token ids.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pdserve.core.clock import Clock
from pdserve.core.config import LimitsConfig
from pdserve.core.errors import (
    InternalError,
    NodeLostError,
    NoNodeError,
    PdserveError,
    ShuttingDownError,
)
from pdserve.core.request import FinishReason, RequestKey, TokenOutput
from router.admission import Admission, AdmissionReport
from router.delivery import (
    Aborted,
    Action,
    ChoiceStopped,
    Delivery,
    EndChoice,
    Ended,
    EndLeg,
    Event,
    Fail,
    LegLost,
    StartLeg,
)
from router.inbox import Call, Inbox, Turns
from router.legs import Job, Legs
from router.metrics import Metrics
from router.nodes import LostNews, News, StateNews, StepNews
from router.running import Parked, Running
from router.spans import NO_SPANS, RequestSpans

RESUBMIT_WAIT_S = 30.0  # how long a request that lost its node waits for one to be ready

logger = logging.getLogger(__name__)


class Dispatcher:
    """All requests of this router that are not over yet."""

    def __init__(
        self,
        *,
        legs: Legs,
        admission: Admission,
        metrics: Metrics,
        limits: LimitsConfig,
        clock: Clock,
        spans: RequestSpans = NO_SPANS,
        new_id: Callable[[], str],
    ) -> None:
        self.nodes_changed = asyncio.Event()  # for one reader, who clears it
        self._legs = legs
        self._admission = admission
        self._metrics = metrics
        self._limits = limits
        self._clock = clock
        self._spans = spans
        self._new_id = new_id
        self._turns = Turns()
        self._running: dict[str, Running] = {}
        self._parked: dict[RequestKey, Parked] = {}
        self._first_legs: dict[str, StartLeg] = {}  # of requests that wait to be let in
        self._letting_in: asyncio.Handle | None = None
        self._queue_deadline: asyncio.TimerHandle | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def closing(self) -> bool:
        return self._closing

    def queues(self) -> AdmissionReport:
        """What waits at the router, and what it refused."""
        return self._admission.report(self._clock.now_s())

    def blocks_left(self) -> dict[str, int]:
        """See ``HeadRoom.blocks_left``."""
        return self._legs.blocks_left()

    def start(
        self,
        jobs: Sequence[Job],
        *,
        label: str,
        tenant: str,
        arrived_s: float,
        traceparent: str | None = None,
    ) -> Call:
        """Take a call's prompts in, all or none. Whatever happens to them comes through the inbox.

        Raises OverloadedError, NeverFitsError (more prompts than are ever taken in) and, while the
        router shuts down, ShuttingDownError.
        """
        if self._closing:
            raise ShuttingDownError("the router is shutting down")
        now_s = self._clock.now_s()
        by_id = {self._new_id(): job for job in jobs}
        self._admission.admit(
            {request_id: job.demand for request_id, job in by_id.items()},
            tenant=tenant,
            priority=jobs[0].priority,
            now_s=now_s,
        )
        self._idle.clear()
        inbox = Inbox(self._turns)
        for prompt, (request_id, job) in enumerate(by_id.items()):
            span, job = self._spans.begin(request_id, job, traceparent, arrived_s)
            running = Running(
                request_id=request_id,
                job=job,
                span=span,
                prompt=prompt,
                inbox=inbox,
                label=label,
                tenant=tenant,
                delivery=Delivery(
                    request_id,
                    num_choices=job.num_choices,
                    max_tokens=job.sampling.max_tokens,
                ),
                arrived_s=arrived_s,
                queued_s=now_s,
                deadline=self._expire_later(request_id),
            )
            self._running[request_id] = running
            self._metrics.prompt_started(len(job.prompt_ids))
            self._carry_out(running, running.delivery.start())
        self._let_in()
        return Call(inbox=inbox, request_ids=tuple(by_id))

    def stop_choice(self, request_id: str, choice: int) -> None:
        """The choice's text reached a stop string: no more tokens are wanted."""
        if running := self._running.get(request_id):
            self._metrics.choice_finished(FinishReason.STOP)
            self._apply(running, ChoiceStopped(choice=choice))

    def abort(self, request_id: str, *, owner: str | None = None) -> bool:
        """End a request and give its reader what there is; False where it is not running.

        With an ``owner``, only what is that tenant's: it is not told of anything else.
        """
        running = self._running.get(request_id)
        if running is None or owner not in (None, running.tenant):
            return False
        self._apply(running, Aborted())
        return True

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nobody reads these any more: end those that still run."""
        for request_id in request_ids:
            if running := self._running.get(request_id):
                self._apply(running, Aborted())

    async def run(self, news: asyncio.Queue[News]) -> None:
        """Follow what the nodes say, for ever."""
        while True:
            item = await news.get()
            self._outermost(partial(self._on_news, item))

    async def close(self, grace_s: float) -> None:
        """Take in nothing more, let what runs end within ``grace_s``, end the rest."""
        self._closing = True
        self.nodes_changed.set()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d requests ended by shutdown", len(self._running))
        self._end_all(ShuttingDownError("the router is shutting down"))
        self._let_in()  # nothing waits any more: its timer goes

    def _outermost(self, step: Callable[[], None]) -> None:
        """What the event loop calls; a fault ends the requests and not the router."""
        try:
            step()
        except Exception:  # the router's outermost loop
            logger.exception("fault of the router")
            self._end_all(InternalError("fault of the router; see its log"))

    def _on_news(self, news: News) -> None:
        match news:
            case StepNews():
                self._on_step(news)
            case StateNews():
                self._legs.heard(news.node)
                self._unpark()
                self._let_in_soon()
                self.nodes_changed.set()
            case LostNews():
                self._on_lost(news)
                self.nodes_changed.set()

    def _on_step(self, news: StepNews) -> None:
        for key, timeline in news.timelines:
            running = self._running.get(key.request_id)
            if running is not None and (leg := running.legs.get(key.attempt)):
                leg.timeline = timeline
                running.told(timeline)
        for part in news.prompts:  # before the first tokens, which they are given with
            if (running := self._running.get(part.request_id)) and part.attempt in running.legs:
                running.inbox.put(running.prompt, part)
        for output in news.outputs:
            if running := self._running.get(output.request_id):
                self._apply(running, output)
        for failure in news.failures:
            if running := self._running.get(failure.request_id):
                running.avoid |= {news.node}
                self._apply(running, failure)

    def _on_lost(self, news: LostNews) -> None:
        for running in list(self._running.values()):
            for attempt, leg in list(running.legs.items()):
                if (leg.node, leg.session) == (news.node, news.session):
                    running.avoid |= {news.node}
                    self._apply(running, LegLost(attempt=attempt, error=news.error))

    def _apply(self, running: Running, event: Event) -> None:
        self._carry_out(running, running.delivery.on(event))

    def _carry_out(self, running: Running, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case TokenOutput():
                    self._deliver(running, action)
                case StartLeg():
                    self._start_leg(running, action)
                case EndLeg():
                    self._end_leg(running, action)
                case EndChoice(attempt=attempt, choice=choice):
                    if leg := running.legs.get(attempt):  # else it waits for a node
                        self._legs.end_choice(leg, choice)
                case Fail():
                    running.error = action.error
        if running.delivery.over and running.request_id in self._running:
            self._close_request(running)

    def _deliver(self, running: Running, output: TokenOutput) -> None:
        num_tokens, now_s = len(output.token_ids), self._clock.now_s()
        if leg := running.legs.get(output.attempt):
            self._legs.output_came(leg, num_tokens, now_s)
        if (last_s := running.last_output_s.get(output.choice)) is not None and num_tokens:
            self._metrics.gap_seen(now_s - last_s)
        running.last_output_s[output.choice] = now_s
        if running.first_token_s is None and num_tokens:
            running.first_token_s = now_s
            self._metrics.first_token_came(running.first_token_s - running.arrived_s)
            self._let_in_soon()
        running.num_tokens += num_tokens
        self._metrics.tokens_came(num_tokens)
        if output.finish_reason is not None:
            self._metrics.choice_finished(output.finish_reason)
        running.inbox.put(running.prompt, output)

    def _start_leg(self, running: Running, start: StartLeg) -> None:
        if start.tries > 1:  # what was begun does not wait again
            if self._try_leg(running, start, running.avoid) is not None:
                self._park(running, start)
        elif self._legs.any_ready():
            self._first_legs[running.request_id] = start
        else:
            self._apply(running, Ended(error=NoNodeError("no decode node is ready")))

    def _let_in_soon(self) -> None:
        """Something changed that may have made room; looked at once, however much changes now."""
        if self._first_legs and self._letting_in is None:
            self._letting_in = asyncio.get_running_loop().call_soon(self._outermost, self._let_in)

    def _let_in(self) -> None:
        """Put on nodes what waits and finds room there; drop what has waited too long."""
        if self._letting_in is not None:
            self._letting_in.cancel()
            self._letting_in = None
        now_s = self._clock.now_s()
        while (late := self._admission.expired(now_s)) is not None:
            self._apply(self._running[late.request_id], Ended(error=late.waited_too_long()))
        while self._let_in_one(now_s):
            pass
        self._watch_queue_deadline(now_s)

    def _let_in_one(self, now_s: float) -> bool:
        for ticket in self._admission.candidates(now_s):
            running = self._running[ticket.request_id]
            start = self._first_legs[ticket.request_id]
            full = self._legs.full_nodes(ticket.demand)
            if full is None:
                self._admission.found_no_room(ticket.request_id, now_s)
            elif not self._legs.prefill_is_far(running.job, start, running.avoid | full):
                self._metrics.request_let_in(self._admission.let_in(ticket.request_id, now_s))
                del self._first_legs[ticket.request_id]
                error = self._try_leg(running, start, running.avoid | full)
                if error is not None:
                    self._apply(running, Ended(error=error))
                return True
        return False

    def _watch_queue_deadline(self, now_s: float) -> None:
        if self._queue_deadline is not None:
            self._queue_deadline.cancel()
            self._queue_deadline = None
        if (deadline_s := self._admission.next_deadline_s()) is not None:
            loop = asyncio.get_running_loop()
            self._queue_deadline = loop.call_later(
                deadline_s - now_s, self._outermost, self._let_in
            )

    def _try_leg(
        self, running: Running, start: StartLeg, avoid: frozenset[str]
    ) -> PdserveError | None:
        """Put the leg on a node; returns why that could not be done now."""
        try:
            leg = self._legs.start(running.request_id, running.job, start, avoid)
        except (NoNodeError, NodeLostError) as error:
            return error
        running.legs[start.attempt] = leg
        running.latest = leg
        running.num_attempts += 1
        if running.submitted_s is None:
            running.submitted_s = self._clock.now_s()
        if start.tries > 1:
            self._metrics.num_retries += 1
            told = {"request_id": leg.key.request_id, "attempt": leg.key.attempt}
            line = "request %s goes on as attempt %s: %s"
            logger.info(line, *leg.key, leg.plan.explain, extra=told)
        return None

    def _end_leg(self, running: Running, end: EndLeg) -> None:
        self._first_legs.pop(running.request_id, None)
        if parked := self._parked.pop(RequestKey(running.request_id, end.attempt), None):
            parked.deadline.cancel()
        if leg := running.legs.pop(end.attempt, None):
            self._legs.end(leg, abort=end.abort)
            self._let_in_soon()
            if leg.timeline is not None:
                self._metrics.routes[leg.timeline.route] += 1

    def _park(self, running: Running, start: StartLeg) -> None:
        error = NoNodeError(f"no decode node was ready to go on within {RESUBMIT_WAIT_S:g} s")
        deadline = asyncio.get_running_loop().call_later(
            RESUBMIT_WAIT_S, self._apply, running, Ended(error=error)
        )
        key = RequestKey(running.request_id, start.attempt)
        self._parked[key] = Parked(running=running, start=start, deadline=deadline)

    def _unpark(self) -> None:
        for key, parked in list(self._parked.items()):
            if self._try_leg(parked.running, parked.start, parked.running.avoid) is None:
                parked.deadline.cancel()
                del self._parked[key]

    def _expire_later(self, request_id: str) -> asyncio.TimerHandle:
        limit_s = self._limits.request_timeout_s
        return asyncio.get_running_loop().call_later(limit_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        self._let_in()  # what still waits has its own error
        if running := self._running.get(request_id):
            error = running.took_too_long(self._limits.request_timeout_s)
            self._apply(running, Ended(error=error))

    def _end_all(self, error: PdserveError) -> None:
        for running in list(self._running.values()):
            self._apply(running, Ended(error=error))

    def _close_request(self, running: Running) -> None:
        """The one place where a request leaves."""
        del self._running[running.request_id]
        running.deadline.cancel()
        now_s = self._clock.now_s()
        self._admission.release(
            running.request_id,
            now_s,
            num_output_tokens=running.num_tokens // running.job.num_choices,
        )
        record = running.record(now_s)
        self._metrics.request_ended(record)
        self._spans.end(running.span, record)
        if not self._running:
            self._idle.set()
        running.inbox.put(running.prompt, running.over())
        logger.info("%s", running.summary(now_s), extra=record.log_fields(running.label))
