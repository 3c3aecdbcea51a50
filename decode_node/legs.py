"""The legs of a decode node: prefills that it has asked other nodes for, and the links to those.

    start ──> expected, asked ──> Arrived (all KV is in; joins once its first tokens are known too)
                          `─────> Failed (told once), or drop ──> cancelled, drained ──> forgotten

Owns which link is up, which leg waits for what, and when a leg's blocks may be used again. Knows
no queue and no route: what a failed leg's sequence does next is the node's decision.
"""

from dataclasses import dataclass
from typing import Protocol

from decode_node.requests import RequestState
from kv_transfer import handoff as handoffs
from kv_transfer.commands import (
    AcceptPeer,
    CancelReceive,
    ClosePeer,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    Peer,
    ReceiveDrained,
)
from pdserve.core.request import HandoffId
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from pdserve.rank.ranks import Ranks


class PrefillLink(Protocol):
    """The session with one prefill node, as the node uses it. Nothing here waits."""

    @property
    def node(self) -> str: ...

    @property
    def peer(self) -> Peer: ...

    def ask(self, handoff: HandoffId, sequence: Sequence, traceparent: str | None) -> None:
        """Ask for the prefill of the sequence's tokens, and for the KV that is not cached here."""

    def cancel(self, handoff: HandoffId) -> None:
        """Nothing more of this handoff is wanted."""

    def close(self) -> None:
        """End the session; it is made anew after a while."""


@dataclass(slots=True, eq=False)
class Leg:
    """``is_ready``: all KV is in its blocks. The sequence joins when its first tokens are known
    too.
    """

    handoff: HandoffId
    link: PrefillLink
    state: RequestState
    sequence: Sequence
    receiver: handoffs.ReceiverHandoff
    num_bytes: int = 0  # received so far, by all ranks
    has_first_tokens: bool = False
    is_ready: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """All KV of the leg is in its sequence's blocks."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Failed:
    """The leg brings nothing; its sequence is to go on elsewhere."""

    leg: Leg
    kind: str
    message: str


LegNews = Arrived | Failed
LegEvent = HandoffReceived | HandoffFailed | ReceiveDrained


class Legs:
    """All links and legs of one node."""

    def __init__(self, ranks: Ranks, ledger: Ledger) -> None:
        self._ranks = ranks
        self._ledger = ledger
        self._accepted: set[PrefillLink] = set()
        self._links: dict[str, PrefillLink] = {}  # by node name; the connected ones of those
        self._legs: dict[HandoffId, Leg] = {}
        self._leg_of: dict[Sequence, Leg] = {}
        self._num_started = 0
        self.kv_bytes_moved = 0

    def __len__(self) -> int:
        return len(self._legs)

    # ---- links ------------------------------------------------------------------------------

    @property
    def connected(self) -> list[str]:
        """The names of the prefill nodes that can be asked."""
        return sorted(self._links)

    @property
    def accepted(self) -> list[PrefillLink]:
        """All links, up or not yet."""
        return list(self._accepted)

    def link_to(self, node: str) -> PrefillLink | None:
        """The link with a prefill node, if it is up."""
        return self._links.get(node)

    def links_with(self, peer_id: str) -> list[PrefillLink]:
        """The accepted links with a peer, up or not yet."""
        return [link for link in self._accepted if link.peer.peer_id == peer_id]

    def accept(self, link: PrefillLink) -> None:
        """Tell the ranks whose links are welcome; the prefill node makes them."""
        self._accepted.add(link)
        self._ranks.kv(AcceptPeer(peer=link.peer))

    def open(self, link: PrefillLink) -> None:
        """The pair is connected and warm."""
        if link in self._accepted:
            self._links[link.node] = link

    def close(self, link: PrefillLink, reason: str) -> list[LegNews]:
        """The pair is over, and what was asked of it. Where only KV is missing the ranks may have
        it: they say so, or that it failed.
        """
        if link not in self._accepted:
            return []
        self._accepted.remove(link)
        if self._links.get(link.node) is link:
            del self._links[link.node]
        self._ranks.kv(ClosePeer(peer_id=link.peer.peer_id))
        news: list[LegNews] = []
        for leg in [leg for leg in self._legs.values() if leg.link is link]:
            if leg.has_first_tokens:
                continue
            if leg.is_ready:  # only the first tokens are missing, and will not come
                news.append(Failed(leg, "link_down_error", reason))
            else:
                news += self._on(leg, handoffs.PeerGone(reason=reason))
        return news

    # ---- legs -------------------------------------------------------------------------------

    def start(self, state: RequestState, sequence: Sequence, link: PrefillLink) -> None:
        """Make the sequence's blocks ready for the KV that they lack, then ask for it."""
        self._num_started += 1
        handoff = HandoffId(*state.request.key, self._num_started)
        receiver = handoffs.ReceiverHandoff(num_ranks=self._ranks.layout.tp_size)
        leg = Leg(handoff, link, state, sequence, receiver)
        self._legs[handoff] = self._leg_of[sequence] = leg
        self._ledger.begin_transfer(sequence)
        num_blocks = self._ledger.num_blocks_for(sequence.num_prompt)
        self._ranks.kv(
            ExpectHandoff(
                handoff=handoff,
                peer_id=link.peer.peer_id,
                start=sequence.num_cached,
                num_tokens=sequence.num_prompt,
                blocks=tuple(sequence.blocks[:num_blocks]),
            )
        )
        link.ask(handoff, sequence, state.span.traceparent if state.span else None)

    def get(self, handoff: HandoffId) -> Leg | None:
        return self._legs.get(handoff)

    def leg_of(self, sequence: Sequence) -> Leg | None:
        return self._leg_of.get(sequence)

    def of(self, state: RequestState) -> list[Leg]:
        """The legs of a request, those included that only drain."""
        return [leg for leg in self._legs.values() if leg.state is state]

    def done(self, leg: Leg) -> None:
        """KV and first tokens are here: the leg has brought what it was for."""
        del self._legs[leg.handoff]
        del self._leg_of[leg.sequence]

    def drop(self, sequence: Sequence) -> None:
        """The sequence is over: what its leg still does is not wanted."""
        if (leg := self._leg_of.get(sequence)) is None:
            return
        if leg.is_ready:  # all KV is in: nothing moves, and there is nothing to cancel
            self.done(leg)
        else:
            self._on(leg, handoffs.Abort())

    def on(self, rank: int, event: LegEvent) -> list[LegNews]:
        """A rank tells of a handoff. Late news of a leg that is done means nothing."""
        leg = self._legs.get(event.handoff)
        match event:
            case HandoffReceived(num_bytes=num_bytes):
                self.kv_bytes_moved += num_bytes
                if leg is None:
                    return []
                leg.num_bytes += num_bytes
                return self._on(leg, handoffs.RankReceived(rank=rank, num_bytes=num_bytes))
            case HandoffFailed(kind=kind, message=message) if leg is not None:
                return self._on(leg, handoffs.RankFailed(rank=rank, kind=kind, message=message))
            case ReceiveDrained() if leg is not None:
                return self._on(leg, handoffs.RankDrained(rank=rank))
        return []

    def _on(self, leg: Leg, event: handoffs.ReceiverEvent) -> list[LegNews]:
        """Feed the handoff's state machine and do what it says."""
        news: list[LegNews] = []
        for action in leg.receiver.on(event):
            match action:
                case handoffs.Ready():
                    leg.is_ready = True
                    self._ledger.received(leg.sequence)
                    news.append(Arrived(leg))
                case handoffs.Cancel():
                    leg.link.cancel(leg.handoff)
                    self._ranks.kv(CancelReceive(handoff=leg.handoff))
                case handoffs.Report(kind=kind, message=message):
                    news.append(Failed(leg, kind, message))
                case handoffs.Drained():
                    self.done(leg)
                    self._ledger.end_transfer(leg.sequence)
        return news
