"""The KV endpoint of one rank of ``tests/fabric.py``: links, pieces on their way, drains."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

from kv_transfer.commands import (
    AcceptPeer,
    CancelReceive,
    CancelSend,
    ClosePeer,
    ConnectPeer,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    KvCommand,
    KvEvent,
    NameTaken,
    Peer,
    PeerConnected,
    PeerLost,
    PushTokens,
    ReceiveDrained,
    SendDrained,
    TakeName,
)
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import HandoffId
from tests.post import Deliver

if TYPE_CHECKING:
    from tests.fabric import Fabric, FabricRanks


@dataclass(eq=False)
class _Link:
    """From a sender rank to a receiver rank, for as long as both keep it."""

    sender: "Endpoint"
    receiver: "Endpoint"
    number: int
    is_open: bool = True


@dataclass(eq=False)
class _Outgoing:
    """A handoff at its sender."""

    peer_id: str
    num_links: int
    blocks: tuple[BlockId, ...] = ()
    num_pushed: int = 0
    is_complete: bool = False
    num_acked: int = 0  # links over which all of it was delivered
    num_bytes: int = 0
    num_moving: int = 0  # pieces that read blocks
    is_over: bool = False  # cancelled or failed: nothing more is sent
    is_cancelled: bool = False


@dataclass(eq=False)
class _Incoming:
    """A handoff at its receiver."""

    peer_id: str
    start: int
    num_tokens: int
    blocks: tuple[BlockId, ...]
    num_moving: int = 0  # pieces that write blocks
    is_over: bool = False
    is_cancelled: bool = False


@dataclass(eq=False)
class _Partner:
    """A peer as this rank knows it: sender side ``connecting``, receiver side accepted."""

    peer: Peer
    num_wanted: int  # links
    links: list[_Link] = field(default_factory=list)
    num_up: int = 0


class Endpoint:
    """What a rank does with KV commands."""

    def __init__(self, fabric: "Fabric", ranks: "FabricRanks", rank: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.is_dead = False
        self._fabric = fabric
        self._partners: dict[str, _Partner] = {}
        self._outgoing: dict[HandoffId, _Outgoing] = {}
        self._incoming: dict[HandoffId, _Incoming] = {}
        self._known: set[HandoffId] = set()  # all that were ever expected
        self._unexpected: dict[HandoffId, list[Deliver]] = {}  # came too early
        self._early: dict[str, list[_Link]] = {}  # came before their peer was accepted
        self._num_links = 0

    # ---- commands ---------------------------------------------------------------------------

    def handle(self, command: KvCommand) -> None:
        if self.is_dead:
            return
        match command:
            case ConnectPeer(peer=peer):
                self._connect(peer)
            case AcceptPeer(peer=peer):
                self._accept(peer)
            case ClosePeer(peer_id=peer_id):
                self._close(peer_id, "closed")
            case ExpectHandoff():
                self._expect(command)
            case PushTokens():
                self._push(command)
            case CancelSend(handoff=handoff):
                self._cancel_send(handoff)
            case CancelReceive(handoff=handoff):
                self._cancel_receive(handoff)
            case TakeName(peer_id=peer_id):
                self._take_name(peer_id)

    # ---- what a test can do to it -----------------------------------------------------------

    @property
    def sending(self) -> list[HandoffId]:
        return [h for h, o in self._outgoing.items() if not o.is_over]

    @property
    def receiving(self) -> list[HandoffId]:
        return [h for h, i in self._incoming.items() if not i.is_over]

    def fail_send(self, handoff: HandoffId, kind: str = "transfer_error") -> None:
        """This rank can not send it."""
        self._outgoing[handoff].is_over = True
        self._tell(HandoffFailed(handoff=handoff, kind=kind, message="fails while sent"))

    def fail_receive(self, handoff: HandoffId, kind: str = "checksum_error") -> None:
        """This rank can not receive it."""
        self._incoming[handoff].is_over = True
        self._tell(HandoffFailed(handoff=handoff, kind=kind, message="fails while received"))

    def lose(self, peer_id: str, reason: str) -> None:
        """The links with a peer break."""
        if peer_id in self._partners:
            self._close(peer_id, reason)
            self._tell(PeerLost(peer_id=peer_id, reason=reason))

    def die(self) -> None:
        self.is_dead = True
        for peer_id in list(self._partners):
            self._close(peer_id, "died")

    def blocks_in_use(self) -> Iterator[BlockId]:
        for outgoing in self._outgoing.values():
            yield from outgoing.blocks
        for incoming in self._incoming.values():
            yield from incoming.blocks

    def _take_name(self, peer_id: str) -> None:
        assert not self._outgoing, "a handoff of the old incarnation is not drained"
        assert not self._incoming, "a handoff of the old incarnation is not drained"
        for partner in list(self._partners):
            self._close(partner, "is another incarnation now")
        self._known.clear()
        self._unexpected.clear()
        self._early.clear()
        self._tell(NameTaken(peer_id=peer_id))
        self.ranks.take_name(peer_id)

    # ---- links ------------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> None:
        mine = self.ranks.layout.tp_size
        addresses = peer.addresses[self.rank :: mine]
        partner = self._partners[peer.peer_id] = _Partner(peer, len(addresses))
        if not addresses:  # its heads come from a replica
            self._tell(PeerConnected(peer_id=peer.peer_id))
        for address in addresses:
            receiver = self._fabric.endpoint(address)
            if receiver is None:
                self.lose(peer.peer_id, "nobody listens there")
                return
            self._num_links += 1
            link = _Link(self, receiver, self._num_links)
            partner.links.append(link)
            self._put_over(link, partial(receiver.be_linked, link))

    def _accept(self, peer: Peer) -> None:
        """One rank of the peer sends to this one; it may have come already."""
        self._partners[peer.peer_id] = _Partner(peer, 1)
        for link in self._early.pop(peer.peer_id, []):
            self.be_linked(link)

    def be_linked(self, link: _Link) -> None:
        """A sender rank has come; it hears so once it is welcome."""
        peer_id = link.sender.ranks.incarnation
        if self.is_dead or not link.is_open:
            return
        if (partner := self._partners.get(peer_id)) is None:
            self._early.setdefault(peer_id, []).append(link)
            return
        partner.links.append(link)
        self._tell(PeerConnected(peer_id=peer_id))
        self._put_back(link, partial(link.sender.be_welcome, link))

    def be_welcome(self, link: _Link) -> None:
        partner = self._partners.get(link.receiver.ranks.incarnation)
        if partner is None or not link.is_open:
            return
        partner.num_up += 1
        if partner.num_up == partner.num_wanted:
            self._tell(PeerConnected(peer_id=partner.peer.peer_id))

    def _close(self, peer_id: str, reason: str) -> None:
        """Let go of all links with a peer; its handoffs fail. The other ends notice later."""
        if (partner := self._partners.pop(peer_id, None)) is None:
            return
        for link in partner.links:
            link.is_open = False
            far = link.receiver if link.sender is self else link.sender
            mine = self.ranks.incarnation
            self._fabric.post.put(
                ("noticed", far.ranks.incarnation, far.rank, mine),
                partial(far.notice, link, mine, reason),
            )
        for handoff, outgoing in self._outgoing.items():
            if outgoing.peer_id == peer_id and not outgoing.is_over:
                self.fail_send(handoff, "link_down_error")
        for handoff, incoming in self._incoming.items():
            if incoming.peer_id == peer_id and not incoming.is_over:
                self.fail_receive(handoff, "link_down_error")

    def notice(self, link: _Link, peer_id: str, reason: str) -> None:
        """The other end of a link has gone."""
        partner = self._partners.get(peer_id)
        if partner is not None and link in partner.links:
            self.lose(peer_id, f"the peer {reason}")

    # ---- sending ----------------------------------------------------------------------------

    def _push(self, push: PushTokens) -> None:
        partner = self._partners.get(push.peer_id)
        links = partner.links if partner is not None else []
        begun = _Outgoing(push.peer_id, len(links), num_pushed=push.start)
        outgoing = self._outgoing.setdefault(push.handoff, begun)
        assert push.start == outgoing.num_pushed, "a gap or an overlap between pushes"
        assert not outgoing.is_complete, "pushed after the last one"
        outgoing.num_pushed, outgoing.is_complete = push.stop, push.last
        outgoing.blocks = push.blocks
        if outgoing.is_over:
            return
        if partner is None or partner.num_up < partner.num_wanted:
            self.fail_send(push.handoff, "link_down_error")
            return
        unit = gcd(self.ranks.layout.block_size, partner.peer.layout.block_size)
        assert push.last or push.stop % unit == 0
        if push.last and not links:
            del self._outgoing[push.handoff]
            self._tell(HandoffSent(handoff=push.handoff, num_bytes=0))
        for link in links:
            self._put_over(link, partial(self._begin, link, outgoing, push))

    def _begin(self, link: _Link, outgoing: _Outgoing, push: PushTokens) -> None:
        """The piece starts to move, unless it is not wanted any more."""
        if self.is_dead or not link.is_open or outgoing.is_over:
            return
        far = link.receiver
        if push.handoff not in far._known:
            waiting = far._unexpected.setdefault(push.handoff, [])
            waiting.append(partial(self._begin, link, outgoing, push))
            return
        incoming = far._incoming.get(push.handoff)
        if far.is_dead or incoming is None or incoming.is_over:
            return
        outgoing.num_moving += 1
        incoming.num_moving += 1
        self._put_over(link, partial(self._land, link, outgoing, incoming, push))

    def _land(
        self, link: _Link, outgoing: _Outgoing, incoming: _Incoming, push: PushTokens
    ) -> None:
        """The piece is read and written, whatever has happened since it started to move."""
        far = link.receiver
        outgoing.num_moving -= 1
        incoming.num_moving -= 1
        if not self.is_dead:
            nodes = self.ranks.read(push.blocks, push.stop)
            if not far.is_dead:
                far.ranks.land(
                    push.handoff, incoming.blocks, far.rank, incoming.start, push.start, nodes
                )
                far.be_reached(push.handoff, incoming, push.stop)
                outgoing.num_bytes += (push.stop - push.start) * far.ranks.layout.token_bytes
                if push.last and link.is_open and not incoming.is_over:
                    self._put_back(link, partial(self._be_acked, push.handoff, outgoing))
        self._drain_send(push.handoff, outgoing)
        far._drain_receive(push.handoff, incoming)

    def _be_acked(self, handoff: HandoffId, outgoing: _Outgoing) -> None:
        outgoing.num_acked += 1
        if outgoing.num_acked == outgoing.num_links and not outgoing.is_over:
            del self._outgoing[handoff]
            self._tell(HandoffSent(handoff=handoff, num_bytes=outgoing.num_bytes))

    def _cancel_send(self, handoff: HandoffId) -> None:
        outgoing = self._outgoing.setdefault(handoff, _Outgoing("", 0))
        outgoing.is_over = outgoing.is_cancelled = True
        self._drain_send(handoff, outgoing)

    def _drain_send(self, handoff: HandoffId, outgoing: _Outgoing) -> None:
        if outgoing.is_cancelled and not outgoing.num_moving:
            del self._outgoing[handoff]
            self._tell(SendDrained(handoff=handoff))

    # ---- receiving --------------------------------------------------------------------------

    def _expect(self, expect: ExpectHandoff) -> None:
        assert expect.handoff not in self._incoming
        assert len(expect.blocks) == self.ranks.layout.num_blocks_for(expect.num_tokens)
        assert expect.start % self.ranks.layout.block_size == 0
        assert 0 <= expect.start < expect.num_tokens
        self._incoming[expect.handoff] = _Incoming(
            expect.peer_id, expect.start, expect.num_tokens, expect.blocks
        )
        self._know(expect.handoff)
        if expect.peer_id not in self._partners:
            self.fail_receive(expect.handoff, "link_down_error")

    def _know(self, handoff: HandoffId) -> None:
        """Its front has named it; what came before goes on."""
        self._known.add(handoff)
        for begin in self._unexpected.pop(handoff, []):
            begin()

    def be_reached(self, handoff: HandoffId, incoming: _Incoming, num_tokens: int) -> None:
        """So many tokens are in the blocks now."""
        if num_tokens == incoming.num_tokens and not incoming.is_over:
            del self._incoming[handoff]
            num_bytes = (num_tokens - incoming.start) * self.ranks.layout.token_bytes
            self._tell(HandoffReceived(handoff=handoff, num_bytes=num_bytes))

    def _cancel_receive(self, handoff: HandoffId) -> None:
        incoming = self._incoming.setdefault(handoff, _Incoming("", 0, 0, ()))
        incoming.is_over = incoming.is_cancelled = True
        self._drain_receive(handoff, incoming)

    def _drain_receive(self, handoff: HandoffId, incoming: _Incoming) -> None:
        if incoming.is_cancelled and not incoming.num_moving:
            del self._incoming[handoff]
            self._tell(ReceiveDrained(handoff=handoff))

    # ---- private ----------------------------------------------------------------------------

    def _tell(self, event: KvEvent) -> None:
        if not self.is_dead:
            self.ranks.tell(self.rank, event)

    def _put_over(self, link: _Link, deliver: Deliver) -> None:
        self._fabric.post.put(_queue(link, "over"), deliver)

    def _put_back(self, link: _Link, deliver: Deliver) -> None:
        self._fabric.post.put(_queue(link, "back"), deliver)


def _queue(link: _Link, way: str) -> tuple[object, ...]:
    ends = (link.sender, link.receiver)
    return (way, link.number, *((end.ranks.incarnation, end.rank) for end in ends))
