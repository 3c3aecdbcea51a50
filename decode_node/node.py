"""A decode node between routers, its scheduler, prefill nodes and its ranks. No gRPC in here.

The node owns the requests that routers gave it; how the KV of their prompts comes to be here is
``prefilling.py``.
"""

import asyncio

from decode_node.events import (
    Admitted,
    Event,
    Forked,
    NewToken,
    PromptScored,
    Replaced,
    sequence_of,
)
from decode_node.grammars import Complete, GrammarNews, Grammars
from decode_node.grammars import Failed as GrammarFailed
from decode_node.intake import make_sequence
from decode_node.legs import Legs, PrefillLink
from decode_node.observer import Observer
from decode_node.prefilling import Prefilling
from decode_node.report import report
from decode_node.requests import RequestState, RouterSession
from decode_node.scheduler import DecodeLimits, DecodeScheduler
from decode_node.timing import Timing
from pdserve.core.clock import Clock
from pdserve.core.config import DecodeConfig
from pdserve.core.errors import InvalidRequestError, NodeLostError, PdserveError
from pdserve.core.node import NodeSpec
from pdserve.core.request import Request, RequestKey
from pdserve.engine.batch import Batch
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from pdserve.rank.idle_trials import IdleTrials
from pdserve.rank.ranks import Ranks
from pdserve.rank.readiness import Readiness
from pdserve.rank.step_loop import run_steps
from pdserve.rank.step_meter import StepMeter
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2
from pdserve.telemetry.traces import Tracer

MASK_WAIT_S = 0.005  # that a step waits for masks at most; nearly all take less than a tenth


class DecodeNode:
    """Owns all state of the node; every method runs in the node's event loop."""

    def __init__(
        self,
        spec: NodeSpec,
        ranks: Ranks,
        clock: Clock,
        meter: StepMeter | None = None,
        tracer: Tracer | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        assert isinstance(spec.pool, DecodeConfig)
        self.spec = spec
        self._meter = meter or StepMeter()
        self.readiness = Readiness()
        self._ranks = ranks
        self._clock = clock
        self._observer = Observer(spec, tracer, clock)
        ledger = Ledger(
            num_blocks=ranks.num_blocks,
            block_size=ranks.layout.block_size,
            num_slots=spec.pool.max_num_seqs,
            enable_prefix_caching=spec.pool.enable_prefix_caching,
        )
        self._limits = DecodeLimits.of(spec.pool)
        self.scheduler = DecodeScheduler(ledger=ledger, clock=clock, limits=self._limits)
        self.legs = Legs(ranks, ledger)
        self._grammars = grammars
        self._prefilling = Prefilling(
            self.scheduler,
            self.legs,
            readiness=self.readiness,
            metrics=self._observer.metrics,
            clock=clock,
        )
        self._requests: dict[RequestKey, RequestState] = {}
        self._sessions: set[RouterSession] = set()
        self._arrivals = asyncio.Event()

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence at most: the file's or the model's bound, and the cache's."""
        bound = self.spec.max_model_len or self.spec.model.max_position
        return min(bound, self.scheduler.ledger.max_tokens)

    @property
    def max_choices(self) -> int:
        """Choices of one request at most."""
        return self._limits.max_sequences

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def fail(self, error: PdserveError) -> None:
        """The node can not go on: what it holds fails, for others to do, and no more is taken."""
        self.readiness.lose(str(error))
        for state in self._requests.values():
            state.put_failure(error, retryable=True)
            self._observer.ended(state, error.kind)
        self._requests.clear()
        for session in self._sessions:
            session.flush()

    def leave(self, reason: str) -> Batch | None:
        """Let go of all prefill nodes, when nothing runs; the step that frees the last slots."""
        for link in self.legs.accepted:
            self.close_link(link, reason)
        return self.scheduler.ledger.last_batch()

    # ---- routers ----------------------------------------------------------------------------

    def open_session(self, session: RouterSession) -> None:
        self._sessions.add(session)

    def close_session(self, session: RouterSession) -> None:
        """The router is gone: everything that it owned ends."""
        self._sessions.discard(session)
        for state in [s for s in self._requests.values() if s.session is session]:
            self._end(state)
        self._act()

    def submit(self, session: RouterSession, message: session_pb2.NodeRequest) -> None:
        """Take on a request, or refuse it at once if this node could never serve it."""
        key = RequestKey(message.request_id, message.attempt)
        owner = self._requests.get(key)
        if owner is not None and owner.session is session:
            return  # a repeated message; the first one counts
        try:
            if owner is not None:
                raise InvalidRequestError("request_id", f"{key} belongs to another router")
            self._take_on(session, convert.request_from_proto(message))
        except InvalidRequestError as error:
            session.put_failure(key, error, retryable=False)
        except NodeLostError as error:
            session.put_failure(key, error, retryable=True)
        self._act()

    def abort(self, session: RouterSession, key: RequestKey) -> None:
        """The router wants nothing more of this request."""
        state = self._requests.get(key)
        if state is not None and state.session is session:
            self._end(state)
            self._act()

    def end_choice(self, session: RouterSession, key: RequestKey, choice: int) -> None:
        """The router wants nothing more of one choice. One that has not parted from the others runs
        on, unheard.
        """
        state = self._requests.get(key)
        if state is None or state.session is not session:
            return
        if (sequence := state.parted(choice)) is not None:
            self.scheduler.remove(sequence)
            self._finish(state, sequence)
            self._act()

    # ---- prefill nodes ----------------------------------------------------------------------

    def accept_link(self, link: PrefillLink) -> None:
        """A prefill node that fits is about to connect its ranks with ours."""
        self._prefilling.accept(link)

    def open_link(self, link: PrefillLink) -> None:
        """The pair is connected and warm."""
        self._prefilling.open(link)

    def close_link(self, link: PrefillLink, reason: str) -> None:
        """The pair is over: what was asked of it goes on elsewhere."""
        self._prefilling.close(link, reason)
        self._act()

    def on_prefill_outputs(self, link: PrefillLink, outputs: session_pb2.PrefillOutputs) -> None:
        """What prefills that this node asked for have given, and how they failed."""
        for part in outputs.prompt_parts:
            self._prefilling.on_prompt_part(link, part)
            self._act()
        for tokens in outputs.first_tokens:
            self._prefilling.on_first_tokens(link, tokens)
            self._act()
        for failure in outputs.failures:
            self._prefilling.on_failure(link, failure)
            self._act()

    # ---- ranks ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decode for ever. Raises RankError when the ranks are lost."""
        steps = run_steps(
            self.scheduler,
            self._ranks,
            depth=self.spec.depth,
            arrivals=self._arrivals,
            clock=self._clock,
            meter=self._meter,
            trials=IdleTrials.of(self.spec, self.scheduler.ledger, self._meter, self._clock),
        )
        async for submitted_s in steps:
            self._tell(submitted_s)
            if self._grammars is not None:
                await self._grammars.settle(MASK_WAIT_S)

    async def run_kv_events(self) -> None:
        """Take in what the ranks' KV endpoints report, for ever. Raises RankError."""
        while True:
            rank, event = await self._ranks.next_event()
            self._prefilling.on_kv_event(rank, event)
            self._act()

    async def run_grammars(self) -> None:
        """Take in what becomes of the requests' grammars, for ever."""
        while self._grammars is not None:
            self._on_grammar_news(await self._grammars.next_news())

    def close_grammars(self) -> None:
        """The node has ended."""
        if self._grammars is not None:
            self._grammars.close()

    def status(self, ranks: list[session_pb2.RankInfo]) -> session_pb2.NodeStatus:
        """The node's load as routers see it."""
        status = report(self.spec, self.scheduler, self.legs, self.readiness.problem)
        status.ranks.extend(ranks)
        status.connected_prefill_nodes.extend(self._prefilling.working_nodes)
        status.troubles.extend(map(convert.trouble_to_proto, self._prefilling.troubles()))
        status.costs.CopyFrom(convert.costs_to_proto(self._meter.costs()))
        status.prefill_chunk = self._limits.local_chunk
        return status

    def metrics(self) -> str:
        """The node's own numbers, as Prometheus reads them."""
        return self._observer.metrics.expose(self.status([]), self._meter.tally)

    # ---- the scheduler's events -------------------------------------------------------------

    def _act(self) -> None:
        """Something from outside has changed what can be planned: act on it, wake the loop."""
        self._tell(None)
        self._arrivals.set()

    def _tell(self, step_submitted_s: float | None) -> None:
        """Act on all that the scheduler has decided, then send each router one message."""
        has_acted, now_s = False, self._clock.now_s()
        while events := self.scheduler.take_events():
            has_acted = True
            for event in events:
                self._on_event(event, step_submitted_s, now_s)
        for session in self._sessions:
            session.flush()
        if has_acted:  # there may be more to plan; what was said above goes out before that
            self._arrivals.set()
        self.readiness.note_idle(not self._requests and self.scheduler.ledger.is_empty)

    def _on_event(self, event: Event, step_submitted_s: float | None, now_s: float) -> None:
        state = self._requests.get(sequence_of(event).key)
        if state is None:
            return  # an event before this one has ended the request, with all its sequences
        match event:
            case NewToken():  # first: nearly all are
                self._on_token(state, event, step_submitted_s, now_s)
            case Admitted(sequence=sequence):
                state.timing.admitted(now_s)
                if (failure := self._prefilling.start(state, sequence)) is not None:
                    self._end(state, failure.kind)
                    state.put_failure(failure, retryable=True)
            case Forked(children=children):
                state.live(*children, from_the_start=False)
            case Replaced(old=old, new=new):
                state.live(*new)
                state.count_replaced(old)
                self._prefilling.drop(old)
            case PromptScored(scored=scored):
                state.put_scored(scored)

    def _on_token(
        self, state: RequestState, event: NewToken, step_submitted_s: float | None, now_s: float
    ) -> None:
        sequence = event.sequence
        if step_submitted_s is not None:
            state.settle_route()
            is_decode = event.index > sequence.num_prompt - sequence.prompt_len
            state.timing.stepped(now_s, step_submitted_s, is_decode=is_decode)
        state.put_token(event)
        if event.finish_reason is not None:
            self._finish(state, sequence)

    def _finish(self, state: RequestState, sequence: Sequence) -> None:
        """A sequence has ended, and the request with the last one."""
        self._prefilling.drop(sequence)
        if state.finish(sequence):
            del self._requests[state.request.key]
            for leg in self.legs.of(state):
                self._prefilling.drop(leg.sequence)
            state.put_timeline()
            self._observer.ended(state)

    # ---- grammars ---------------------------------------------------------------------------

    def _on_grammar_news(self, news: GrammarNews) -> None:
        if isinstance(news, GrammarFailed) and (state := self._requests.get(news.state.key)):
            if any(sequence.constraint is news.state for sequence in state.sequences):
                self._end(state, news.error.kind)
                state.put_failure(news.error, retryable=False)
        elif isinstance(news, Complete) and (state := self._requests.get(news.key)):
            self._end(state, None)
            state.put_complete()
        self._act()

    # ---- begin and end of a request ---------------------------------------------------------

    def _take_on(self, session: RouterSession, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError or, if the node is ending, NodeLostError."""
        if self.readiness.problem is not None:
            raise NodeLostError(f"{self.spec.name}: {self.readiness.problem}")
        now_s = self._clock.now_s()
        sequence = make_sequence(
            request,
            self.spec.model,
            max_model_len=self.max_model_len,
            max_choices=self.max_choices,
            arrived_s=now_s,
            grammars=self._grammars,
        )
        timing = Timing(node=self.spec.name, submitted_s=now_s)
        span = self._observer.begun(request)
        state = RequestState(request=request, session=session, timing=timing, span=span)
        state.live(sequence)
        self._requests[request.key] = state
        assert self.scheduler.fits(sequence)
        self.scheduler.add(sequence)
        self.scheduler.admit()

    def _end(self, state: RequestState, error: str | None = "aborted") -> None:
        """Free all that a request holds; nobody is told."""
        del self._requests[state.request.key]
        for sequence in (*state.sequences, *(leg.sequence for leg in self.legs.of(state))):
            self.scheduler.remove(sequence)
            self._prefilling.drop(sequence)
        self._observer.ended(state, error)
