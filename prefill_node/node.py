"""A prefill node between its sessions, its scheduler and its ranks. No gRPC in here.

Decode nodes ask for prefills (``prefill``), the loop computes them in chunks, each chunk's KV is
pushed at once, the first tokens are sent as soon as they are sampled. The KV of a prompt lives
here as long as its handoff: its blocks are freed when the last byte is delivered, or when the
handoff has ended in any other way and nothing reads them any more.
"""

import asyncio
import logging
from dataclasses import dataclass

from kv_transfer import handoff as handoffs
from kv_transfer.commands import (
    CancelSend,
    ClosePeer,
    ConnectPeer,
    HandoffFailed,
    HandoffSent,
    KvEvent,
    Peer,
    PeerConnected,
    PeerLost,
    PushTokens,
    SendDrained,
)
from pdserve.core.clock import Clock
from pdserve.core.config import PrefillConfig
from pdserve.core.errors import InvalidRequestError, NodeLostError, PdserveError
from pdserve.core.node import NodeSpec
from pdserve.core.request import HandoffId
from pdserve.engine.batch import Batch, Sampled
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from pdserve.rank.idle_trials import IdleTrials
from pdserve.rank.ranks import Ranks
from pdserve.rank.readiness import Readiness
from pdserve.rank.step_loop import run_steps
from pdserve.rank.step_meter import StepMeter
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2
from pdserve.telemetry.traces import Span, Tracer
from prefill_node.intake import make_sender, make_sequence
from prefill_node.link_meter import LinkMeter
from prefill_node.observer import Observer
from prefill_node.scheduler import PrefillScheduler, TokensComputed
from prefill_node.sessions import DecodeSession

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Prefill:
    """One prefill in work: its sequence, its handoff and when it began."""

    handoff: HandoffId
    session: DecodeSession
    sequence: Sequence
    sender: handoffs.SenderHandoff
    span: Span | None  # None: it is not traced
    first_planned_s: float | None = None
    times_s: tuple[float, float] | None = None  # in the queue and in work, once it is computed
    error: str | None = None  # what ended it, other than its last byte


class PrefillNode:
    """Owns all state of the node; every method runs in the node's event loop."""

    def __init__(
        self,
        spec: NodeSpec,
        ranks: Ranks,
        clock: Clock,
        meter: StepMeter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        assert isinstance(spec.pool, PrefillConfig)
        self.spec = spec
        self._chunk_len = spec.pool.max_num_batched_tokens
        self._meter = meter or StepMeter()
        self._link_meter = LinkMeter(
            token_bytes=ranks.layout.token_bytes * ranks.layout.tp_size,
            num_ranks=ranks.layout.tp_size,
        )
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
        self.scheduler = PrefillScheduler(
            ledger=ledger,
            clock=clock,
            max_num_batched_tokens=spec.pool.max_num_batched_tokens,
            overtake_s=spec.pool.overtake_s,
        )
        self._sessions: dict[str, DecodeSession] = {}  # by peer id
        self._prefills: dict[HandoffId, _Prefill] = {}
        self._by_sequence: dict[Sequence, _Prefill] = {}
        self._arrivals = asyncio.Event()
        self._kv_bytes_moved = 0

    @property
    def max_model_len(self) -> int:
        """Tokens of one prompt at most: the file's or the model's bound, and the cache's."""
        bound = self.spec.max_model_len or self.spec.model.max_position
        return min(bound, self.scheduler.ledger.max_tokens)

    @property
    def num_prefills(self) -> int:
        """Prefills in work, those included whose KV is still read."""
        return len(self._prefills)

    def fail(self, error: PdserveError) -> None:
        """The node can not go on: what it holds fails, for others to do, and no more is taken."""
        self.readiness.lose(str(error))
        for prefill in self._prefills.values():
            prefill.session.put_failure(prefill.handoff, error.kind, str(error))
        for session in self._sessions.values():
            session.flush()

    def leave(self, reason: str) -> Batch | None:
        """Let go of all decode nodes, when nothing runs; the step that frees the last slots."""
        for session in list(self._sessions.values()):
            self.disconnect(session, reason)
        return self.scheduler.ledger.last_batch()

    # ---- decode nodes -----------------------------------------------------------------------

    def connect(self, peer: Peer, outbox: Outbox[session_pb2.PrefillMessage]) -> DecodeSession:
        """A decode node's session is open; an older one of the same incarnation ends."""
        if (old := self._sessions.get(peer.peer_id)) is not None:
            self.disconnect(old, "replaced by a newer session")
        session = DecodeSession(peer, outbox)
        self._sessions[peer.peer_id] = session
        return session

    def make_links(self, session: DecodeSession) -> None:
        """The decode ranks know us now: connect every rank to those that it sends to."""
        if self._sessions.get(session.peer.peer_id) is session:
            self._ranks.kv(ConnectPeer(peer=session.peer))

    def disconnect(self, session: DecodeSession, reason: str) -> None:
        """The session is over: everything that it asked for ends."""
        if self._sessions.get(session.peer.peer_id) is not session:
            return
        del self._sessions[session.peer.peer_id]
        session.outbox.close()
        self._ranks.kv(ClosePeer(peer_id=session.peer.peer_id))
        for prefill in [p for p in self._prefills.values() if p.session is session]:
            self._on(prefill, handoffs.PeerGone(reason=reason))
        logger.info("decode node %s disconnected: %s", session.peer.peer_id, reason)

    def prefill(self, session: DecodeSession, task: session_pb2.PrefillTask) -> None:
        """Queue a prompt, or refuse it at once if this node could never compute it."""
        handoff = convert.handoff_from_proto(task.handoff)
        owner = self._prefills.get(handoff)
        if owner is not None and owner.session is session:
            return  # a repeated message; the first one counts
        try:
            if owner is not None:
                raise InvalidRequestError("handoff", f"{handoff} belongs to another decode node")
            self._take_on(session, handoff, task)
        except (InvalidRequestError, NodeLostError) as error:
            session.put_failure(handoff, error.kind, str(error))
            session.flush()

    def abort(self, session: DecodeSession, handoff: HandoffId) -> None:
        """The decode node wants nothing more of this prefill."""
        prefill = self._prefills.get(handoff)
        if prefill is not None and prefill.session is session:
            self._on(prefill, handoffs.Abort())

    # ---- ranks ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compute for ever. Raises RankError when the ranks are lost."""
        steps = run_steps(
            self.scheduler,
            self._ranks,
            depth=self.spec.depth,
            arrivals=self._arrivals,
            clock=self._clock,
            meter=self._meter,
            trials=IdleTrials.of(self.spec, self.scheduler.ledger, self._meter, self._clock),
        )
        async for _ in steps:
            self._note_planned()
            for event in self.scheduler.take_events():
                self._on_computed(event)
            for session in self._sessions.values():
                session.flush()
            self._note_idle()

    async def run_kv_events(self) -> None:
        """Take in what the ranks' KV endpoints report, for ever. Raises RankError."""
        while True:
            rank, event = await self._ranks.next_event()
            self._on_kv_event(rank, event)
            self._note_idle()

    def status(self, ranks: list[session_pb2.RankInfo]) -> session_pb2.NodeStatus:
        """The node's load as routers and decode nodes see it."""
        ledger = self.scheduler.ledger
        return session_pb2.NodeStatus(
            node=self.spec.name,
            role=self.spec.role,
            ready=self.readiness.problem is None,
            reason=self.readiness.problem or "",
            total_blocks=ledger.pool.num_blocks,
            free_blocks=ledger.pool.num_free,
            block_size=ledger.block_size,
            running=len(self._prefills) - self.scheduler.num_waiting,
            waiting=self.scheduler.num_waiting,
            queued_prefill_tokens=self.scheduler.num_queued_tokens,
            kv_bytes_moved=self._kv_bytes_moved,
            draining_blocks=ledger.num_draining_blocks,
            prefix_cache_queries=ledger.num_queried_tokens,
            prefix_cache_hits=ledger.num_hit_tokens,
            ranks=ranks,
            costs=convert.costs_to_proto(self._meter.costs(self._link_meter.cost())),
            prefill_chunk=self._chunk_len,
        )

    def metrics(self) -> str:
        """The node's own numbers, as Prometheus reads them."""
        return self._observer.metrics.expose(self.status([]), self._meter.tally)

    # ---- begin of a prefill -----------------------------------------------------------------

    def _take_on(
        self, session: DecodeSession, handoff: HandoffId, task: session_pb2.PrefillTask
    ) -> None:
        """Queue a prompt. Raises InvalidRequestError or, if the node is ending, NodeLostError."""
        if self.readiness.problem is not None:
            raise NodeLostError(f"{self.spec.name}: {self.readiness.problem}")
        sequence = make_sequence(
            task, self.spec, max_model_len=self.max_model_len, arrived_s=self._clock.now_s()
        )
        sender = make_sender(task, self._ranks.layout, session.peer.layout)
        span = self._observer.begun(handoff, sequence.num_prompt, task.traceparent or None)
        prefill = _Prefill(handoff, session, sequence, sender, span)
        self._prefills[handoff] = self._by_sequence[sequence] = prefill
        self.scheduler.add(sequence)
        self._note_idle()
        self._arrivals.set()

    def _note_idle(self) -> None:
        self.readiness.note_idle(not self._prefills and self.scheduler.ledger.is_empty)

    # ---- what steps and ranks tell ----------------------------------------------------------

    def _note_planned(self) -> None:
        now_s = self._clock.now_s()
        for prefill in self._prefills.values():
            is_planned = prefill.sequence.num_planned > prefill.sequence.num_cached
            if prefill.first_planned_s is None and is_planned:
                prefill.first_planned_s = now_s

    def _on_computed(self, event: TokensComputed) -> None:
        prefill = self._by_sequence[event.sequence]
        last = event.first is not None
        if event.scored is not None:
            prefill.session.put_scored(prefill.handoff, event.scored)
        self._on(prefill, handoffs.TokensComputed(num_tokens=event.num_tokens, last=last))
        if event.first is not None:
            prefill.session.put_first_tokens(self._first_tokens(prefill, event.first))

    def _on_kv_event(self, rank: int, event: KvEvent) -> None:
        match event:
            case PeerConnected(peer_id=peer_id):
                self._on_connected(rank, peer_id)
            case PeerLost(peer_id=peer_id, reason=reason):
                if (session := self._sessions.get(peer_id)) is not None:
                    self.disconnect(session, f"KV link: {reason}")
            case HandoffSent(handoff=handoff, num_bytes=num_bytes):
                self._kv_bytes_moved += num_bytes
                self._link_meter.sent(handoff, num_bytes, self._clock.now_s())
                self._on_handoff(handoff, handoffs.RankSent(rank=rank, num_bytes=num_bytes))
            case HandoffFailed(handoff=handoff, kind=kind, message=message):
                failed = handoffs.RankFailed(rank=rank, kind=kind, message=message)
                self._on_handoff(handoff, failed)
            case SendDrained(handoff=handoff):
                self._on_handoff(handoff, handoffs.RankDrained(rank=rank))
            case _:
                raise AssertionError(f"a prefill rank sent {event}")

    def _on_connected(self, rank: int, peer_id: str) -> None:
        session = self._sessions.get(peer_id)
        if session is None:
            return
        session.connected_ranks.add(rank)
        if len(session.connected_ranks) == self._ranks.layout.tp_size:
            logger.info("decode node %s connected", peer_id)
            session.outbox.put(session_pb2.PrefillMessage(links_ready=session_pb2.LinksReady()))

    # ---- handoffs ---------------------------------------------------------------------------

    def _on_handoff(self, handoff: HandoffId, event: handoffs.SenderEvent) -> None:
        if (prefill := self._prefills.get(handoff)) is not None:
            self._on(prefill, event)

    def _on(self, prefill: _Prefill, event: handoffs.SenderEvent) -> None:
        """Feed the handoff's state machine and do what it says."""
        for action in prefill.sender.on(event):
            match action:
                case handoffs.Push(start=start, stop=stop, last=last):
                    self._push(prefill, start, stop, last)
                case handoffs.Cancel():
                    prefill.error = prefill.error or "aborted"
                    self.scheduler.remove(prefill.sequence)
                    self._ranks.kv(CancelSend(handoff=prefill.handoff))
                case handoffs.Report(kind=kind, message=message):
                    prefill.error = kind
                    self._observer.metrics.handoff_failed(kind)
                    prefill.session.put_failure(prefill.handoff, kind, message)
                    prefill.session.flush()
                case handoffs.Free():
                    self._free(prefill)

    def _push(self, prefill: _Prefill, start: int, stop: int, last: bool) -> None:
        now_s = self._clock.now_s()
        self._link_meter.pushed(prefill.handoff, stop - start, now_s, last=last)
        self._ranks.kv(
            PushTokens(
                handoff=prefill.handoff,
                peer_id=prefill.session.peer.peer_id,
                start=start,
                stop=stop,
                blocks=tuple(prefill.sequence.blocks),
                last=last,
            )
        )

    def _free(self, prefill: _Prefill) -> None:
        self._link_meter.ended(prefill.handoff)
        del self._prefills[prefill.handoff]
        del self._by_sequence[prefill.sequence]
        self.scheduler.release(prefill.sequence)
        self._observer.ended(prefill.handoff, prefill.span, prefill.times_s, prefill.error)
        self._arrivals.set()

    def _first_tokens(self, prefill: _Prefill, first: Sampled) -> session_pb2.FirstTokens:
        now_s = self._clock.now_s()
        begun_s = prefill.first_planned_s
        assert begun_s is not None
        queue_s, prefill_s = begun_s - prefill.sequence.arrived_s, now_s - begun_s
        prefill.times_s = queue_s, prefill_s
        self._observer.computed(prefill.span, queue_s=queue_s, prefill_s=prefill_s)
        return session_pb2.FirstTokens(
            handoff=convert.handoff_to_proto(prefill.handoff),
            token_ids=first.tokens,
            logprobs=[convert.logprobs_to_proto(item) for item in first.logprobs],
            queue_s=queue_s,
            prefill_s=prefill_s,
            cached_tokens=prefill.sequence.num_cached,
        )
