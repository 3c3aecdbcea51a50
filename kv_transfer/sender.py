"""The sending side of a rank's endpoint: peers to send to, their links, handoffs on the way out.

Runs in the endpoint's one thread, so a block is read only inside ``send_next``, or on a GPU soon
after it: what is cancelled between two calls is drained when such copies are. Where blocks are lent
instead, they are taken back then: what the receiver copies after that it drops. Frames of all
handoffs share the links in the order of ``FrameQueue``.
"""

import logging
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field

from kv_transfer.closing import close_links
from kv_transfer.commands import (
    CancelSend,
    HandoffSent,
    Peer,
    PeerConnected,
    PushTokens,
    SendDrained,
)
from kv_transfer.frame_queue import Flow, FrameQueue, LinkId
from kv_transfer.local_rank import LocalRank
from kv_transfer.messages import Delivered, Heartbeat, Message, Rejected
from kv_transfer.outbound import OutboundLink
from kv_transfer.outgoing import FrameCutter, Outgoing
from kv_transfer.reasons import failed, lost
from kv_transfer.reshard import (
    HeadSlice,
    PieceGrid,
    cell_bytes,
    check_compatible,
    exchange_unit,
    head_slices,
)
from kv_transfer.settled import Settled
from kv_transfer.transports.load import LinkFactory, load_link
from kv_transfer.transports.transport import Closed, Opened, Payloads, Stream, StreamEvent
from pdserve.core.errors import (
    ConfigError,
    HandshakeError,
    LinkDownError,
    PdserveError,
    TransferError,
)
from pdserve.core.request import HandoffId

logger = logging.getLogger(__name__)

MAX_LENT_CELLS = 4096  # of a frame: its message names as many blocks at most
PATIENCE_S = 0.5  # short handoffs overtake one that has waited less


@dataclass(slots=True)
class _Peer:
    """A peer that we send to. ``links`` are empty where other ranks serve all of its heads."""

    peer: Peer
    unit: int
    links: dict[LinkId, OutboundLink] = field(default_factory=dict)

    def cutter(self, local: LocalRank) -> FrameCutter:
        """All links of a peer are of one transport."""
        cell = cell_bytes(local.layout, self.unit)
        most = local.frames(self.peer.transport).num_bytes
        is_lent = any(x.link.payloads is Payloads.LENT for x in self.links.values())
        return FrameCutter(cell, min(most, MAX_LENT_CELLS * cell) if is_lent else most)


class Sender:
    """Owns the links that this rank dialled and the handoffs that it sends."""

    def __init__(self, local: LocalRank) -> None:
        self._local = local
        self._peers: dict[str, _Peer] = {}
        self._links: dict[LinkId, OutboundLink] = {}
        self._link_of: dict[Stream, LinkId] = {}
        self._handoffs: dict[HandoffId, Outgoing] = {}
        self._settled = Settled()
        self._queue = FrameQueue(local.clock, patience_s=PATIENCE_S)
        self._draining: deque[HandoffId] = deque()  # cancelled, not known to be drained

    def connect(self, peer: Peer) -> None:
        """Make the links to a peer; those that there are already are dropped."""
        self.close_peer(peer.peer_id, LinkDownError("the peer is being connected anew"))
        try:
            self._dial(peer)
        except (HandshakeError, ConfigError, TransferError) as error:
            self._lose(peer.peer_id, error)
            return
        self._report_if_up(peer.peer_id)

    def close_peer(self, peer_id: str, error: PdserveError) -> None:
        """Drop the links with a peer; its handoffs fail with ``error``.

        Raises what draining does: then its links stay, and it is to be lost.
        """
        if (connected := self._peers.get(peer_id)) is None:
            return
        for outgoing in [o for o in self._handoffs.values() if o.peer_id == peer_id]:
            self._fail(outgoing.handoff, error)
        del self._peers[peer_id]
        for link_id in connected.links:
            self._links.pop(link_id, None)
        self._link_of = {s: link for s, link in self._link_of.items() if link in self._links}
        close_links([outbound.link for outbound in connected.links.values()], peer_id)

    def fail_all(self, error: PdserveError) -> None:
        """All peers are lost. Raises what draining does: then nothing is known to be drained."""
        for peer_id in list(self._peers):
            self._lose(peer_id, error)
        self._drain()

    def close(self) -> None:
        for peer_id in list(self._peers):
            self.close_peer(peer_id, LinkDownError("the endpoint is closed"))

    def push(self, push: PushTokens) -> None:
        """More of a handoff is computed. What comes for a settled handoff is late and ignored."""
        if self._settled.end_of(push.handoff) is not None:
            return
        try:
            outgoing = self._handoffs.get(push.handoff) or self._begin(push)
            fresh = outgoing.push(push, num_blocks=self._local.pieces.num_blocks)
        except TransferError as error:
            self._fail(push.handoff, error)
            return
        for link_id, num_bytes in fresh.items():
            self._queue.add(Flow(push.handoff, link_id), num_bytes)
        self._settle_if_done(outgoing)

    def cancel(self, cancel: CancelSend) -> None:
        """No block is read outside ``send_next`` or lent after this: it is drained soon."""
        self._forget(cancel.handoff, "was cancelled by its front")
        self._draining.append(cancel.handoff)
        self._drain()

    def on(self, event: StreamEvent) -> None:
        """Something happened on a stream that this rank dialled."""
        link_id = self._link_of.get(event.stream)
        if link_id is None or isinstance(event, Opened):
            return  # news of a link that was dropped
        if isinstance(event, Closed):
            self._lose(link_id.peer_id, event.error)
            return
        outbound = self._links[link_id]
        outbound.heard()
        try:
            if (message := outbound.link.on(event)) is not None:
                self._on_message(outbound, message)
        except (TransferError, HandshakeError) as error:
            self._lose(link_id.peer_id, error)

    def send_next(self) -> bool:
        """Send one frame, if there is one and its link has room. True if one was sent, or its
        handoff has failed.
        """
        has_room = {link_id for link_id, outbound in self._links.items() if outbound.has_room}
        flow = self._queue.choose(has_room) if has_room else None
        if flow is None:
            return False
        try:
            num_bytes = self._links[flow.link].send_next(self._handoffs[flow.handoff])
        except TransferError as error:
            self._fail(flow.handoff, error)
        else:
            self._queue.sent(flow, num_bytes)
        return True

    def tend(self, now_s: float) -> None:
        """Heartbeats and deadlines; called now and then."""
        for link_id, outbound in list(self._links.items()):
            if self._links.get(link_id) is not outbound:
                continue  # lost with another link of its peer
            try:
                outbound.check(now_s)
            except TransferError as error:
                self._lose(link_id.peer_id, error)

    def _dial(self, peer: Peer) -> None:
        """Raises HandshakeError, ConfigError, LinkDownError, and what libraries fail with; the
        links that are made by then are the peer's, and close with it.
        """
        local = self._local
        check_compatible(local.layout, peer.layout)
        if len(peer.addresses) != peer.layout.tp_size:
            raise HandshakeError(
                "addresses",
                ours=peer.layout.tp_size,
                theirs=len(peer.addresses),
                cure="every rank of the peer needs an address",
            )
        dialled = _Peer(peer, exchange_unit(local.layout, peer.layout))
        self._peers[peer.peer_id] = dialled  # from here on it is lost by name, whatever fails
        make_link = load_link(peer.transport)
        if peer.layout.block_size != local.layout.block_size:
            local.pieces.warm_up(dialled.unit)
        for part in head_slices(local.layout, peer.layout):
            if part.sender_rank == local.rank:
                self._dial_rank(dialled, part, make_link)

    def _dial_rank(self, dialled: _Peer, part: HeadSlice, make_link: LinkFactory) -> None:
        local, peer = self._local, dialled.peer
        with ExitStack() as undo:
            stream = local.wire.connect(peer.addresses[part.receiver_rank])
            undo.callback(stream.close)
            link = make_link(stream, local.links)
            undo.pop_all()
        link_id = LinkId(peer.peer_id, part.receiver_rank)
        outbound = OutboundLink(link, link_id, part.sender_heads, local, peer.transport)
        dialled.links[link_id] = self._links[link_id] = outbound
        self._link_of[stream] = link_id
        outbound.greet(peer)

    def _on_message(self, outbound: OutboundLink, message: Message) -> None:
        peer_id = outbound.link_id.peer_id
        if not outbound.is_up:
            if outbound.shake_hands(self._peers[peer_id].peer, message):
                self._report_if_up(peer_id)
            return
        match message.body:
            case Heartbeat():
                pass
            case Delivered(seq=seq):
                frame = outbound.answered(seq)
                if (outgoing := self._handoffs.get(frame.handoff)) is not None:
                    outgoing.delivered(frame.num_bytes)
                    self._settle_if_done(outgoing)
            case Rejected(seq=seq, kind=kind, message=text):
                self._reject(outbound.answered(seq).handoff, kind, text)
            case body:
                raise LinkDownError(f"unexpected {type(body).__name__} on a link that is up")

    def _report_if_up(self, peer_id: str) -> None:
        links = self._peers[peer_id].links
        if all(outbound.is_up for outbound in links.values()):
            self._local.events.put(PeerConnected(peer_id=peer_id))
            logger.info("rank %d: %d KV links to %s", self._local.rank, len(links), peer_id)

    def _begin(self, first: PushTokens) -> Outgoing:
        connected = self._peers.get(first.peer_id)
        if connected is None:
            raise LinkDownError(f"there are no links with {first.peer_id}")
        unit, layout = connected.unit, self._local.layout
        outgoing = Outgoing(
            first,
            {link_id: len(outbound.heads) for link_id, outbound in connected.links.items()},
            grid=PieceGrid(unit, layout.block_size),
            cutter=connected.cutter(self._local),
        )
        self._handoffs[first.handoff] = outgoing
        return outgoing

    def _settle_if_done(self, outgoing: Outgoing) -> None:
        if outgoing.is_done:
            self._forget(outgoing.handoff, "was sent")
            num_bytes = outgoing.num_bytes_delivered
            self._local.events.put(HandoffSent(handoff=outgoing.handoff, num_bytes=num_bytes))

    def _reject(self, handoff: HandoffId, kind: str, text: str) -> None:
        if handoff in self._handoffs:
            self._local.pieces.drain()
            self._forget(handoff, f"failed: {text}")
            self._local.events.put(failed(handoff, kind, text))

    def _fail(self, handoff: HandoffId, error: PdserveError) -> None:
        self._local.pieces.drain()
        self._forget(handoff, f"failed: {error}")
        self._local.events.put(failed(handoff, error.kind, str(error)))

    def _drain(self) -> None:
        self._local.pieces.drain()
        while self._draining:
            self._local.events.put(SendDrained(handoff=self._draining.popleft()))

    def _forget(self, handoff: HandoffId, end: str) -> None:
        self._handoffs.pop(handoff, None)
        for outbound in self._links.values():
            outbound.take_back(handoff)
        self._queue.remove(handoff)
        self._settled.add(handoff, end)

    def _lose(self, peer_id: str, error: PdserveError) -> None:
        news = lost(peer_id, error)
        logger.warning("rank %d: no KV links to %s: %s", self._local.rank, peer_id, news.reason)
        self._local.events.put(news)
        self.close_peer(peer_id, error)
