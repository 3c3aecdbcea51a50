"""A decode node between routers, its scheduler, prefill nodes and its ranks. No gRPC in here.

The node owns the requests that routers gave it, and for each sequence that is prefilled elsewhere
the leg to the prefill node: expect the KV, ask, take the first tokens, wait for the last block,
decode. What fails on the way goes on by the request's route: the next prefill node, then this node
itself.
"""

import asyncio
import logging

from decode_node.events import Admitted, Event, Forked, NewToken, Replaced
from decode_node.legs import Leg, PrefillLink
from decode_node.requests import RequestState, RouterSession
from decode_node.scheduler import DecodeLimits, DecodeScheduler
from decode_node.timing import Timing
from kv_transfer import handoff as handoffs
from kv_transfer.commands import (
    AcceptPeer,
    CancelReceive,
    ClosePeer,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    KvEvent,
    PeerConnected,
    PeerLost,
    ReceiveDrained,
)
from pdserve.core.clock import Clock
from pdserve.core.config import DecodeConfig
from pdserve.core.errors import NeverFitsError, PdserveError, PrefillFailedError
from pdserve.core.node import NodeSpec
from pdserve.core.request import HandoffId, Request, RequestKey, RouteTaken
from pdserve.engine.batch import Sampled
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from pdserve.rank.ranks import Ranks
from pdserve.rank.step_loop import run_steps
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2

logger = logging.getLogger(__name__)


class DecodeNode:
    """Owns all state of the node; every method runs in the node's event loop."""

    def __init__(self, spec: NodeSpec, ranks: Ranks, clock: Clock) -> None:
        assert isinstance(spec.pool, DecodeConfig)
        self.spec = spec
        self._ranks = ranks
        self._clock = clock
        pool = spec.pool
        ledger = Ledger(
            num_blocks=ranks.num_blocks,
            block_size=ranks.layout.block_size,
            num_slots=pool.max_num_seqs,
        )
        limits = DecodeLimits(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            local_prefill_tokens=pool.local_prefill_tokens,
            fallback_chunk=pool.fallback_chunk,
            headroom_tokens=pool.headroom_tokens,
            overtake_s=pool.overtake_s,
        )
        self.scheduler = DecodeScheduler(ledger=ledger, clock=clock, limits=limits)
        self._requests: dict[RequestKey, RequestState] = {}
        self._legs: dict[HandoffId, Leg] = {}
        self._leg_of: dict[Sequence, Leg] = {}
        self._accepted: set[PrefillLink] = set()
        self._links: dict[str, PrefillLink] = {}  # by node name; the connected ones of those
        self._sessions: set[RouterSession] = set()
        self._arrivals = asyncio.Event()
        self.kv_bytes_moved = 0

    @property
    def num_ranks(self) -> int:
        return self._ranks.layout.tp_size

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence at most: the file's or the model's bound, and the cache's."""
        bound = self.spec.max_model_len or self.spec.model.max_position
        return min(bound, self.scheduler.ledger.max_tokens)

    @property
    def connected_prefill_nodes(self) -> list[str]:
        return sorted(self._links)

    # ---- routers ----------------------------------------------------------------------------

    def open_session(self, session: RouterSession) -> None:
        self._sessions.add(session)

    def close_session(self, session: RouterSession) -> None:
        """The router is gone: everything that it owned ends."""
        self._sessions.discard(session)
        for state in [s for s in self._requests.values() if s.session is session]:
            self._end(state)
        self._act()

    def submit(self, session: RouterSession, request: Request) -> None:
        """Take on a request, or refuse it at once if it could never fit."""
        if request.key in self._requests:
            return  # a repeated message; the first one counts
        sequence = self._make_sequence(request)
        timing = Timing(node=self.spec.name, submitted_s=self._clock.now_s())
        state = RequestState(request=request, session=session, timing=timing)
        state.live(sequence)
        if not self.scheduler.fits(sequence) or sequence.num_prompt >= self.max_model_len:
            self._refuse(state, sequence)
            return
        self._requests[request.key] = state
        self.scheduler.add(sequence)
        self.scheduler.admit()
        self._act()

    def abort(self, session: RouterSession, key: RequestKey) -> None:
        """The router wants nothing more of this request."""
        state = self._requests.get(key)
        if state is not None and state.session is session:
            self._end(state)
            self._act()

    # ---- prefill nodes ----------------------------------------------------------------------

    def accept_link(self, link: PrefillLink) -> None:
        """Tell the ranks whose links are welcome; the prefill node makes them."""
        self._accepted.add(link)
        self._ranks.kv(AcceptPeer(peer=link.peer))

    def open_link(self, link: PrefillLink) -> None:
        """The pair is connected and warm."""
        if link in self._accepted:
            self._links[link.node] = link

    def close_link(self, link: PrefillLink, reason: str) -> None:
        """The pair is over: its handoffs fail and go on elsewhere."""
        if link not in self._accepted:
            return
        self._accepted.remove(link)
        if self._links.get(link.node) is link:
            del self._links[link.node]
        self._ranks.kv(ClosePeer(peer_id=link.peer.peer_id))
        for leg in [leg for leg in self._legs.values() if leg.link is link]:
            if leg.is_ready:
                self._fail_leg(leg, "link_down_error", reason)
            else:
                self._on_leg(leg, handoffs.PeerGone(reason=reason))
        self._act()

    def on_prefill_outputs(self, outputs: session_pb2.PrefillOutputs) -> None:
        """First tokens and failures of prefills that this node asked for."""
        for tokens in outputs.first_tokens:
            leg = self._legs.get(convert.handoff_from_proto(tokens.handoff))
            if leg is not None and not leg.sequence.over:
                self._on_first_tokens(leg, tokens)
        for failure in outputs.failures:
            leg = self._legs.get(convert.handoff_from_proto(failure.handoff))
            if leg is not None:
                self._fail_leg(leg, failure.kind, failure.message)
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
        )
        async for submitted_s in steps:
            self._act(step_submitted_s=submitted_s, wake=False)

    async def run_kv_events(self) -> None:
        """Take in what the ranks' KV endpoints report, for ever. Raises RankError."""
        while True:
            rank, event = await self._ranks.next_event()
            self._on_kv_event(rank, event)
            self._act()

    def status(self, ranks: list[session_pb2.RankInfo]) -> session_pb2.NodeStatus:
        """The node's load as routers see it."""
        ledger = self.scheduler.ledger
        return session_pb2.NodeStatus(
            node=self.spec.name,
            role=self.spec.role,
            ready=True,
            total_blocks=ledger.pool.num_blocks,
            free_blocks=ledger.pool.num_free,
            block_size=ledger.block_size,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            queued_prefill_tokens=self.scheduler.num_queued_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            kv_bytes_moved=self.kv_bytes_moved,
            draining_blocks=ledger.num_draining_blocks,
            ranks=ranks,
            connected_prefill_nodes=self.connected_prefill_nodes,
        )

    # ---- the scheduler's events -------------------------------------------------------------

    def _act(self, *, step_submitted_s: float | None = None, wake: bool = True) -> None:
        """Act on all that the scheduler has decided, then send each router one message."""
        while events := self.scheduler.take_events():
            for event in events:
                self._on_event(event, step_submitted_s)
        for session in self._sessions:
            session.flush()
        if wake:
            self._arrivals.set()

    def _on_event(self, event: Event, step_submitted_s: float | None) -> None:
        state = self._requests.get(_sequence_of(event).key)
        if state is None:
            return  # the request ended while this was on its way
        match event:
            case Admitted(sequence=sequence):
                state.timing.admitted(self._clock.now_s())
                self._prefill(state, sequence)
            case Forked(children=children):
                state.live(*children, from_the_start=False)
            case Replaced(old=old, new=new):
                state.live(*new)
                state.num_preemptions += 1
                self._drop_leg(old)
            case NewToken():
                self._on_token(state, event, step_submitted_s)

    def _on_token(
        self, state: RequestState, event: NewToken, step_submitted_s: float | None
    ) -> None:
        now_s = self._clock.now_s()
        state.timing.token(now_s, step_submitted_s)
        state.put_token(event)
        if event.finish_reason is None:
            return
        self._drop_leg(event.sequence)
        if state.finish(event.sequence):
            self._drop_legs(state)
            del self._requests[state.request.key]
            state.put_timeline()

    def _prefill(self, state: RequestState, sequence: Sequence) -> None:
        """Have a reserved sequence prefilled by the next stop of its route."""
        while (node := state.next_alternate(sequence)) is not None:
            if (link := self._links.get(node)) is not None:
                self._start_leg(state, sequence, link)
                return
        route = state.request.route
        if route.prefill_nodes and not route.local_allowed:
            reason = state.last_failure or "no prefill node of its route is connected"
            self._fail(state, PrefillFailedError(f"prefill: {reason}"), retryable=True)
            return
        is_routed_here = not route.prefill_nodes
        state.route_taken = RouteTaken.LOCAL if is_routed_here else RouteTaken.FALLBACK
        self.scheduler.prefill_locally(sequence, budgeted=is_routed_here)
        state.timing.local_started(self._clock.now_s())

    # ---- legs -------------------------------------------------------------------------------

    def _start_leg(self, state: RequestState, sequence: Sequence, link: PrefillLink) -> None:
        handoff = state.next_handoff()
        receiver = handoffs.ReceiverHandoff(num_ranks=self.num_ranks)
        leg = Leg(handoff, link, state, sequence, receiver)
        self._legs[handoff] = self._leg_of[sequence] = leg
        ledger = self.scheduler.ledger
        ledger.begin_transfer(sequence)
        blocks = sequence.blocks[: ledger.num_blocks_for(sequence.num_prompt)]
        self._ranks.kv(
            ExpectHandoff(
                handoff=handoff,
                peer_id=link.peer.peer_id,
                num_tokens=sequence.num_prompt,
                blocks=tuple(blocks),
            )
        )
        link.ask(handoff, sequence)
        state.route_taken = RouteTaken.DISAGGREGATED
        state.transport = link.peer.transport

    def _on_first_tokens(self, leg: Leg, tokens: session_pb2.FirstTokens) -> None:
        logprobs = tuple(convert.logprobs_from_proto(item) for item in tokens.logprobs)
        first = Sampled(tokens=tuple(tokens.token_ids), logprobs=logprobs)
        leg.state.timing.prefilled(
            self._clock.now_s(), leg.link.node, tokens.queue_s, tokens.prefill_s
        )
        self.scheduler.first_tokens(leg.sequence, first)
        leg.has_first_tokens = True
        if leg.sequence.over:
            self._drop_leg(leg.sequence)
        elif leg.is_ready:
            self._join(leg)

    def _join(self, leg: Leg) -> None:
        """KV and first tokens are here: the sequence decodes, the leg is done."""
        leg.state.timing.transferred(self._clock.now_s())
        self._forget(leg)
        self.scheduler.join(leg.sequence)

    def _on_kv_event(self, rank: int, event: KvEvent) -> None:
        match event:
            case PeerConnected():
                pass  # the prefill node says when the whole pair is ready
            case PeerLost(peer_id=peer_id, reason=reason):
                for link in [k for k in self._accepted if k.peer.peer_id == peer_id]:
                    self.close_link(link, f"KV link: {reason}")
                    link.close()
            case HandoffReceived(handoff=handoff, num_bytes=num_bytes):
                self.kv_bytes_moved += num_bytes
                if (leg := self._legs.get(handoff)) is not None:
                    leg.state.kv_bytes += num_bytes
                    self._on_leg(leg, handoffs.RankReceived(rank=rank, num_bytes=num_bytes))
            case HandoffFailed(handoff=handoff, kind=kind, message=message):
                if (leg := self._legs.get(handoff)) is not None:
                    failed = handoffs.RankFailed(rank=rank, kind=kind, message=message)
                    self._on_leg(leg, failed)
            case ReceiveDrained(handoff=handoff):
                if (leg := self._legs.get(handoff)) is not None:
                    self._on_leg(leg, handoffs.RankDrained(rank=rank))
            case _:
                raise AssertionError(f"a decode rank sent {event}")

    def _on_leg(self, leg: Leg, event: handoffs.ReceiverEvent) -> None:
        """Feed the handoff's state machine and do what it says."""
        for action in leg.receiver.on(event):
            match action:
                case handoffs.Ready():
                    leg.is_ready = True
                    self.scheduler.ledger.end_transfer(leg.sequence)
                    if leg.has_first_tokens:
                        self._join(leg)
                case handoffs.Cancel():
                    leg.link.cancel(leg.handoff)
                    self._ranks.kv(CancelReceive(handoff=leg.handoff))
                case handoffs.Report(kind=kind, message=message):
                    self._go_on(leg, kind, message)
                case handoffs.Drained():
                    self._forget(leg)
                    self.scheduler.ledger.end_transfer(leg.sequence)

    def _fail_leg(self, leg: Leg, kind: str, message: str) -> None:
        """The prefill node can not do it."""
        self._go_on(leg, kind, message)
        self._drop_leg(leg.sequence)

    def _go_on(self, leg: Leg, kind: str, message: str) -> None:
        """After a failure: the sequence's next life takes the next stop of the route."""
        if leg.sequence.over:
            return
        logger.warning("%s: %s on %s: %s", leg.handoff, kind, leg.link.node, message)
        leg.state.last_failure = message
        new = self.scheduler.start_again(leg.sequence)
        leg.state.live(*new, from_the_start=False)

    def _drop_leg(self, sequence: Sequence) -> None:
        """The sequence is over: what its leg still does is not wanted."""
        if (leg := self._leg_of.get(sequence)) is None:
            return
        if leg.is_ready:
            self._forget(leg)  # all KV is in, nothing is on its way
            leg.link.cancel(leg.handoff)
        else:
            self._on_leg(leg, handoffs.Abort())

    def _drop_legs(self, state: RequestState) -> None:
        for leg in [leg for leg in self._legs.values() if leg.state is state]:
            self._drop_leg(leg.sequence)

    def _forget(self, leg: Leg) -> None:
        del self._legs[leg.handoff]
        del self._leg_of[leg.sequence]

    # ---- ends -------------------------------------------------------------------------------

    def _end(self, state: RequestState) -> None:
        """Free all that a request holds; nobody is told."""
        self._requests.pop(state.request.key, None)
        for leg in [leg for leg in self._legs.values() if leg.state is state]:
            self.scheduler.remove(leg.sequence)
        for sequence in state.sequences:
            self.scheduler.remove(sequence)
        self._drop_legs(state)

    def _fail(self, state: RequestState, error: PdserveError, *, retryable: bool) -> None:
        self._end(state)
        state.put_failure(error, retryable=retryable)

    def _refuse(self, state: RequestState, sequence: Sequence) -> None:
        num_choices = len(sequence.choices)
        problem = (
            f"{sequence.num_prompt} tokens and {num_choices} choices; node {self.spec.name} "
            f"takes up to {self.max_model_len - 1} tokens of prompt"
        )
        state.put_failure(NeverFitsError("prompt", problem), retryable=False)
        state.session.flush()

    def _make_sequence(self, request: Request) -> Sequence:
        sampling = request.sampling
        ends = () if sampling.ignore_eos else self.spec.model.eos_token_ids
        return Sequence(
            key=request.key,
            choices=request.choices,
            sampling=sampling,
            prompt_len=request.prompt_len,
            token_ids=list(request.token_ids),
            end_token_ids=(*ends, *sampling.stop_token_ids),
            max_len=min(request.prompt_len + sampling.max_tokens, self.max_model_len),
            arrived_s=self._clock.now_s(),
        )


def _sequence_of(event: Event) -> Sequence:
    match event:
        case Forked(parent=sequence) | Replaced(old=sequence):
            return sequence
        case Admitted(sequence=sequence) | NewToken(sequence=sequence):
            return sequence
