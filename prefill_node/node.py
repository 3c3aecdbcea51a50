"""A prefill node between its sessions, its scheduler and its ranks. No gRPC in here.

Decode nodes ask for prefills (``prefill``), the loop computes them in chunks, each chunk's KV is
pushed at once, the first tokens are sent as soon as they are sampled. The KV of a prompt lives
here as long as its handoff: its blocks are freed when the last byte is delivered, or when the
handoff has ended in any other way and nothing reads them any more.
"""

import asyncio
import logging
from dataclasses import dataclass
from math import gcd

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
from pdserve.core.errors import NeverFitsError
from pdserve.core.node import NodeSpec
from pdserve.core.request import HandoffId
from pdserve.engine.batch import Sampled
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from pdserve.rank.ranks import Ranks
from pdserve.rank.step_loop import run_steps
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2
from prefill_node.scheduler import PrefillScheduler, TokensComputed

logger = logging.getLogger(__name__)

PrefillOutbox = Outbox[session_pb2.PrefillMessage]


@dataclass(slots=True, eq=False)
class DecodeSession:
    """One decode node that is connected."""

    peer: Peer
    outbox: PrefillOutbox
    connected_ranks: set[int]


@dataclass(slots=True, eq=False)
class _Prefill:
    """One prefill in work: its sequence, its handoff and when it began."""

    handoff: HandoffId
    session: DecodeSession
    sequence: Sequence
    sender: handoffs.SenderHandoff
    first_planned_s: float | None = None


class PrefillNode:
    """Owns all state of the node; every method runs in the node's event loop."""

    def __init__(self, spec: NodeSpec, ranks: Ranks, clock: Clock) -> None:
        assert isinstance(spec.pool, PrefillConfig)
        self.spec = spec
        self._ranks = ranks
        self._clock = clock
        ledger = Ledger(
            num_blocks=ranks.num_blocks,
            block_size=ranks.layout.block_size,
            num_slots=spec.pool.max_num_seqs,
        )
        self.scheduler = PrefillScheduler(
            ledger=ledger,
            clock=clock,
            max_num_batched_tokens=spec.pool.max_num_batched_tokens,
            class_bounds=spec.prompt_classes,
            overtake_s=spec.pool.overtake_s,
        )
        self._sessions: dict[str, DecodeSession] = {}  # by peer id
        self._prefills: dict[HandoffId, _Prefill] = {}
        self._by_sequence: dict[Sequence, _Prefill] = {}
        self._arrivals = asyncio.Event()
        self.kv_bytes_moved = 0
        self.is_draining = False

    @property
    def num_ranks(self) -> int:
        return self._ranks.layout.tp_size

    def connect(self, peer: Peer, outbox: PrefillOutbox) -> DecodeSession:
        """A decode node's session is open; an older one of the same incarnation ends."""
        if (old := self._sessions.get(peer.peer_id)) is not None:
            self.disconnect(old, "replaced by a newer session")
        session = DecodeSession(peer, outbox, set())
        self._sessions[peer.peer_id] = session
        return session

    def make_links(self, session: DecodeSession) -> None:
        """The decode ranks know us now: connect every rank to those that it sends to."""
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
        """Queue a prompt, or refuse it at once if it could never fit."""
        handoff = convert.handoff_from_proto(task.handoff)
        if handoff in self._prefills:
            return  # a repeated message; the first one counts
        sequence = self._make_sequence(handoff, task)
        if not self.scheduler.fits(sequence.num_prompt):
            most = self.scheduler.ledger.max_tokens
            problem = f"{sequence.num_prompt} tokens; node {self.spec.name} holds {most}"
            self._send_failure(session, handoff, NeverFitsError("prompt", problem))
            return
        sender = handoffs.SenderHandoff(
            num_ranks=self.num_ranks,
            unit=gcd(self._ranks.layout.block_size, session.peer.layout.block_size),
        )
        prefill = _Prefill(handoff, session, sequence, sender)
        self._prefills[handoff] = self._by_sequence[sequence] = prefill
        self.scheduler.add(sequence)
        self._arrivals.set()

    def abort(self, session: DecodeSession, handoff: HandoffId) -> None:
        """The decode node wants nothing more of this prefill."""
        prefill = self._prefills.get(handoff)
        if prefill is not None and prefill.session is session:
            self._on(prefill, handoffs.Abort())

    async def run(self) -> None:
        """Compute for ever. Raises RankError when the ranks are lost."""
        steps = run_steps(
            self.scheduler,
            self._ranks,
            depth=self.spec.depth,
            arrivals=self._arrivals,
            clock=self._clock,
        )
        async for _ in steps:
            self._note_planned()
            for event in self.scheduler.take_events():
                self._on_computed(event)

    async def run_kv_events(self) -> None:
        """Take in what the ranks' KV endpoints report, for ever. Raises RankError."""
        while True:
            rank, event = await self._ranks.next_event()
            self._on_kv_event(rank, event)

    def status(self, ranks: list[session_pb2.RankInfo]) -> session_pb2.NodeStatus:
        """The node's load as routers and decode nodes see it."""
        ledger = self.scheduler.ledger
        return session_pb2.NodeStatus(
            node=self.spec.name,
            role=self.spec.role,
            ready=True,
            total_blocks=ledger.pool.num_blocks,
            free_blocks=ledger.pool.num_free,
            block_size=ledger.block_size,
            running=len(self._prefills) - self.scheduler.num_waiting,
            waiting=self.scheduler.num_waiting,
            queued_prefill_tokens=self.scheduler.num_queued_tokens,
            kv_bytes_moved=self.kv_bytes_moved,
            draining_blocks=ledger.num_draining_blocks,
            ranks=ranks,
        )

    def _make_sequence(self, handoff: HandoffId, task: session_pb2.PrefillTask) -> Sequence:
        sampling = convert.sampling_from_proto(task.sampling)
        ends = () if sampling.ignore_eos else self.spec.model.eos_token_ids
        return Sequence(
            key=handoff.key,
            choices=tuple(task.choices),
            sampling=sampling,
            prompt_len=task.prompt_len,
            token_ids=list(task.token_ids),
            end_token_ids=(*ends, *sampling.stop_token_ids),
            max_len=len(task.token_ids) + 1,
            arrived_s=self._clock.now_s(),
        )

    def _note_planned(self) -> None:
        now_s = self._clock.now_s()
        for prefill in self._prefills.values():
            if prefill.first_planned_s is None and prefill.sequence.num_planned:
                prefill.first_planned_s = now_s

    def _on_computed(self, event: TokensComputed) -> None:
        prefill = self._by_sequence[event.sequence]
        last = event.first is not None
        self._on(prefill, handoffs.TokensComputed(num_tokens=event.num_tokens, last=last))
        if event.first is not None:
            self._send_first_tokens(prefill, event.first)

    def _on_kv_event(self, rank: int, event: KvEvent) -> None:
        match event:
            case PeerConnected(peer_id=peer_id):
                self._on_connected(rank, peer_id)
            case PeerLost(peer_id=peer_id, reason=reason):
                if (session := self._sessions.get(peer_id)) is not None:
                    self.disconnect(session, f"KV link: {reason}")
            case HandoffSent(handoff=handoff, num_bytes=num_bytes):
                self.kv_bytes_moved += num_bytes
                self._on_handoff(handoff, handoffs.RankSent(rank=rank, num_bytes=num_bytes))
            case HandoffFailed(handoff=handoff, kind=kind, message=message):
                self._on_handoff(
                    handoff, handoffs.RankFailed(rank=rank, kind=kind, message=message)
                )
            case SendDrained(handoff=handoff):
                self._on_handoff(handoff, handoffs.RankDrained(rank=rank))
            case _:
                raise AssertionError(f"a prefill rank sent {event}")

    def _on_connected(self, rank: int, peer_id: str) -> None:
        session = self._sessions.get(peer_id)
        if session is None:
            return
        session.connected_ranks.add(rank)
        if len(session.connected_ranks) == self.num_ranks:
            logger.info("decode node %s connected", peer_id)
            session.outbox.put(session_pb2.PrefillMessage(links_ready=session_pb2.LinksReady()))

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
                    self.scheduler.remove(prefill.sequence)
                    self._ranks.kv(CancelSend(handoff=prefill.handoff))
                case handoffs.Report(kind=kind, message=message):
                    self._put_failure(prefill.session, prefill.handoff, kind, message)
                case handoffs.Free():
                    self._free(prefill)

    def _push(self, prefill: _Prefill, start: int, stop: int, last: bool) -> None:
        sequence = prefill.sequence
        self._ranks.kv(
            PushTokens(
                handoff=prefill.handoff,
                peer_id=prefill.session.peer.peer_id,
                start=start,
                stop=stop,
                blocks=tuple(sequence.blocks),
                last=last,
            )
        )

    def _free(self, prefill: _Prefill) -> None:
        del self._prefills[prefill.handoff]
        del self._by_sequence[prefill.sequence]
        self.scheduler.release(prefill.sequence)
        self._arrivals.set()

    def _send_first_tokens(self, prefill: _Prefill, first: Sampled) -> None:
        now_s = self._clock.now_s()
        begun_s = prefill.first_planned_s or now_s
        tokens = session_pb2.FirstTokens(
            handoff=convert.handoff_to_proto(prefill.handoff),
            token_ids=first.tokens,
            logprobs=[convert.logprobs_to_proto(item) for item in first.logprobs],
            queue_s=begun_s - prefill.sequence.arrived_s,
            prefill_s=now_s - begun_s,
        )
        outputs = session_pb2.PrefillOutputs(first_tokens=[tokens])
        prefill.session.outbox.put(session_pb2.PrefillMessage(outputs=outputs))

    def _send_failure(
        self, session: DecodeSession, handoff: HandoffId, error: NeverFitsError
    ) -> None:
        self._put_failure(session, handoff, error.kind, str(error))

    def _put_failure(
        self, session: DecodeSession, handoff: HandoffId, kind: str, message: str
    ) -> None:
        failure = session_pb2.PrefillFailure(
            handoff=convert.handoff_to_proto(handoff), kind=kind, message=message
        )
        outputs = session_pb2.PrefillOutputs(failures=[failure])
        session.outbox.put(session_pb2.PrefillMessage(outputs=outputs))
