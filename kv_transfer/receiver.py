"""The receiving side of a rank's endpoint: welcome peers, their links, handoffs on the way in.

Runs in the endpoint's one thread, which begins to copy a frame in ``_take``, and waits for the
copies that it has begun before anything is cancelled or closed: then all is drained, and later
frames are rejected. Frames that come before their ExpectHandoff are held for a while, at most a
window of them on each link.
"""

import logging
from collections import deque
from dataclasses import dataclass, field

from kv_transfer.closing import close_links
from kv_transfer.commands import (
    CancelReceive,
    ExpectHandoff,
    HandoffReceived,
    Peer,
    PeerConnected,
    ReceiveDrained,
)
from kv_transfer.frame_queue import LinkId
from kv_transfer.held_frames import Held, HeldFrames
from kv_transfer.inbound import InboundLink
from kv_transfer.incoming import Incoming
from kv_transfer.lobby import Lobby
from kv_transfer.local_rank import LocalRank, check_hello
from kv_transfer.messages import Frame, Heartbeat, Hello, Message
from kv_transfer.payload import Borrowed, Payload, allocating
from kv_transfer.pieces import Copying
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
from kv_transfer.transports.load import load_link
from kv_transfer.transports.transport import Arrived, Closed, Opened, Stream, StreamEvent
from pdserve.core.errors import (
    ConfigError,
    HandshakeError,
    LinkDownError,
    PdserveError,
    TransferError,
    TransferTimeoutError,
)
from pdserve.core.request import HandoffId

logger = logging.getLogger(__name__)

MAX_HELD = 8  # frames of one link that wait to be expected; no honest sender has more unanswered


@dataclass(slots=True)
class _Peer:
    """A welcome peer. It stays welcome when its links are lost."""

    peer: Peer
    unit: int
    slices: dict[int, HeadSlice]  # by sender rank
    links: dict[LinkId, InboundLink] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A frame that is being copied. ``payload`` must live until that is over."""

    inbound: InboundLink
    incoming: Incoming
    frame: Frame
    payload: Payload
    copying: Copying


class Receiver:
    """Owns the links that others dialled and the handoffs that this rank receives."""

    def __init__(self, local: LocalRank) -> None:
        self._local = local
        self._lobby = Lobby(patience_s=local.patience_s)
        self._peers: dict[str, _Peer] = {}
        self._links: dict[LinkId, InboundLink] = {}
        self._link_of: dict[Stream, LinkId] = {}
        self._handoffs: dict[HandoffId, Incoming] = {}
        self._held = HeldFrames(max_per_link=MAX_HELD, patience_s=local.patience_s)
        self._settled = Settled()
        self._begun: deque[_Begun] = deque()  # the oldest first
        self._draining: deque[HandoffId] = deque()  # cancelled, not known to be drained

    def accept(self, peer: Peer) -> None:
        """Links from this peer are welcome. Said again with the same facts, it changes nothing."""
        known = self._peers.get(peer.peer_id)
        if known is not None and known.peer == peer:
            return
        self.close_peer(peer.peer_id, LinkDownError("the peer is being accepted anew"))
        layout = self._local.layout
        try:
            check_compatible(layout, peer.layout)
            load_link(peer.transport)
        except (HandshakeError, ConfigError) as error:
            self._local.events.put(lost(peer.peer_id, error))
            return
        slices = {
            part.sender_rank: part
            for part in head_slices(peer.layout, layout)
            if part.receiver_rank == self._local.rank
        }
        unit = exchange_unit(peer.layout, layout)
        self._peers[peer.peer_id] = _Peer(peer, unit, slices)  # it is lost by name, whatever fails
        if peer.layout.block_size != layout.block_size:
            self._local.pieces.warm_up(unit)
        self._welcome(peer.peer_id)

    def close_peer(self, peer_id: str, error: PdserveError) -> None:
        """Drop the links with a peer, which is not welcome any more; its handoffs fail."""
        self._drop_links(peer_id, error)
        self._peers.pop(peer_id, None)

    def fail_all(self, error: PdserveError) -> None:
        """All peers are lost. Raises what waiting for copies does: then nothing is known to be
        drained.
        """
        for peer_id in list(self._peers):
            self._lose(peer_id, error)
        self._drain()

    def close(self) -> None:
        for peer_id in list(self._peers):
            self.close_peer(peer_id, LinkDownError("the endpoint is closed"))
        self._lobby.close()

    def expect(self, expected: ExpectHandoff) -> None:
        """A handoff will come, or has begun to."""
        try:
            incoming = self._begin(expected)
        except TransferError as error:
            self._fail(expected.handoff, error)
            return
        self._settle_if_done(incoming)
        for held in self._held.take(expected.handoff):
            self._take(self._links[held.link_id], held.frame, held.payload)

    @property
    def is_copying(self) -> bool:
        return bool(self._begun)

    def finish_one(self) -> None:
        """Wait for the oldest copy, and answer for its frame.

        Raises what the wait does. Then the copy is not known to be over, and is waited for again
        before anything is told to be drained.
        """
        self._begun[0].copying.wait()
        self._finish(self._begun.popleft())

    def cancel(self, cancel: CancelReceive) -> None:
        """No block is written once the copies are over: it is drained then, known or not."""
        self._draining.append(cancel.handoff)
        self._drain()

    def on(self, event: StreamEvent) -> None:
        """Something happened on a stream that another rank dialled."""
        link_id = self._link_of.get(event.stream)
        if link_id is None:
            self._on_guest(event)
            return
        if isinstance(event, Closed):
            self._lose(link_id.peer_id, event.error)
            return
        assert not isinstance(event, Opened)
        inbound = self._links[link_id]
        inbound.heard()
        try:
            if (message := inbound.link.on(event)) is not None:
                self._on_message(inbound, message)
        except TransferError as error:
            self._lose(link_id.peer_id, error)

    def tend(self, now_s: float) -> None:
        """Deadlines; called now and then."""
        self._lobby.tend(now_s)
        for link_id, inbound in list(self._links.items()):
            if self._links.get(link_id) is not inbound:
                continue  # lost with another link of its peer
            try:
                inbound.check(now_s)
            except TransferError as error:
                self._lose(link_id.peer_id, error)
        for handoff in self._held.overdue(now_s):
            problem = f"was not expected here within {self._local.patience_s} s"
            self._forget(handoff, problem, error=TransferTimeoutError)

    def _on_guest(self, event: StreamEvent) -> None:
        match event:
            case Opened(stream=stream):
                self._lobby.open(stream, self._local.clock.now_s())
            case Closed(stream=stream):
                self._lobby.drop(stream)
            case Arrived(stream=stream, message=message):
                self._lobby.greet(stream, message)
                if isinstance(message.body, Hello):
                    self._welcome(message.body.peer_id)

    def _welcome(self, peer_id: str) -> None:
        """Turn the streams of this peer's ranks into links, if the peer is welcome."""
        known = self._peers.get(peer_id)
        if known is None:
            return
        for stream, hello in self._lobby.waiting(peer_id):
            try:
                check_hello(known.peer, hello)
                if hello.rank not in known.slices:
                    raise LinkDownError(f"rank {hello.rank} has nothing to send to this rank")
            except (HandshakeError, LinkDownError) as error:
                logger.warning("rank %d refuses %s: %s", self._local.rank, peer_id, error)
                self._lobby.refuse(stream, error)
                continue
            self._admit(known, stream, LinkId(peer_id, hello.rank))

    def _admit(self, known: _Peer, stream: Stream, link_id: LinkId) -> None:
        if link_id in self._links:  # the sender knows before us that the old one is dead
            self._lose(link_id.peer_id, LinkDownError("replaced by a newer link"))
        self._lobby.admit(stream)
        transport = known.peer.transport
        link = load_link(transport)(stream, self._local.links)
        inbound = InboundLink(link, link_id, transport, self._local)
        known.links[link_id] = self._links[link_id] = inbound
        self._link_of[stream] = link_id

    def _on_message(self, inbound: InboundLink, message: Message) -> None:
        if not inbound.is_up:
            if inbound.shake_hands(message):
                self._report_if_up(inbound.link_id.peer_id)
            return
        match message.body:
            case Heartbeat():
                inbound.answer_heartbeat()
            case Frame() as frame:
                self._take(inbound, frame, message.payload)
            case body:
                raise LinkDownError(f"unexpected {type(body).__name__} on a link that is up")

    def _report_if_up(self, peer_id: str) -> None:
        known = self._peers[peer_id]
        if len(known.links) == len(known.slices) and all(x.is_up for x in known.links.values()):
            self._local.events.put(PeerConnected(peer_id=peer_id))
            logger.info("rank %d: %d KV links from %s", self._local.rank, len(known.links), peer_id)

    def _begin(self, expected: ExpectHandoff) -> Incoming:
        known = self._peers.get(expected.peer_id)
        if known is None:
            raise LinkDownError(f"{expected.peer_id} is no peer of this rank")
        if expected.handoff in self._handoffs:
            raise TransferError("the handoff was expected twice")
        if (end := self._settled.end_of(expected.handoff)) is not None:
            raise TransferError(f"the handoff {end}")
        layout = self._local.layout
        incoming = Incoming(
            expected,
            known.slices,
            grid=PieceGrid(known.unit, layout.block_size),
            cell_bytes=cell_bytes(layout, known.unit),
            num_blocks=self._local.pieces.num_blocks,
        )
        self._handoffs[expected.handoff] = incoming
        return incoming

    def _take(self, inbound: InboundLink, frame: Frame, payload: Payload | None) -> None:
        """Write a frame into the blocks of its handoff, hold it, or reject it."""
        incoming = self._handoffs.get(frame.handoff)
        if incoming is None:
            self._hold_or_reject(inbound, frame, payload)
            return
        peer_id, sender_rank = inbound.link_id
        if incoming.peer_id != peer_id:
            inbound.reject(frame.seq, TransferError("the handoff is expected from another node"))
            return
        try:
            begun = self._begin_copy(inbound, incoming, frame, payload)
        except TransferError as error:
            self._refuse(inbound, frame, error)
            return
        incoming.begin(sender_rank, frame)
        self._begun.append(begun)  # before anything can fail: it is waited for
        if begun.copying.is_over:
            self._finish(self._begun.pop())

    def _begin_copy(
        self, inbound: InboundLink, incoming: Incoming, frame: Frame, payload: Payload | None
    ) -> _Begun:
        """Raises TransferError if the frame is wrong, its bytes are not what was sent, or there is
        no memory for them.
        """
        heads = incoming.check(inbound.link_id.rank, frame, payload)
        assert payload is not None
        with allocating():
            copying = self._local.pieces.scatter(
                payload, incoming.blocks, frame.pieces, heads, unit=incoming.unit
            )
        return _Begun(inbound, incoming, frame, payload, copying)

    def _finish(self, begun: _Begun) -> None:
        """The copy is over: answer for the frame."""
        inbound, incoming, frame = begun.inbound, begun.incoming, begun.frame
        if self._handoffs.get(frame.handoff) is not incoming:
            end = self._settled.end_of(frame.handoff)
            inbound.reject(frame.seq, TransferError(f"the handoff {end}"))
            return
        try:
            if isinstance(begun.payload, Borrowed):
                begun.payload.check_valid()
        except TransferError as error:
            self._refuse(inbound, frame, error)
            return
        incoming.received(frame)
        inbound.deliver(frame.seq)
        self._settle_if_done(incoming)

    def _drain(self) -> None:
        self._finish_all()
        while self._draining:
            handoff = self._draining.popleft()
            self._forget(handoff, "was cancelled by the receiver's front")
            self._local.events.put(ReceiveDrained(handoff=handoff))

    def _finish_all(self) -> None:
        while self._begun:
            self.finish_one()

    def _refuse(self, inbound: InboundLink, frame: Frame, error: TransferError) -> None:
        inbound.reject(frame.seq, error)
        self._fail(frame.handoff, error)

    def _hold_or_reject(self, inbound: InboundLink, frame: Frame, payload: Payload | None) -> None:
        if (end := self._settled.end_of(frame.handoff)) is not None:
            inbound.reject(frame.seq, TransferError(f"the handoff {end}"))
        elif not self._held.hold(Held(inbound.link_id, frame, payload, self._local.clock.now_s())):
            problem = "too many frames of handoffs that are not expected here"
            inbound.reject(frame.seq, TransferError(problem))

    def _settle_if_done(self, incoming: Incoming) -> None:
        if incoming.is_complete:
            self._forget(incoming.handoff, "was received")
            num_bytes = incoming.num_bytes
            self._local.events.put(HandoffReceived(handoff=incoming.handoff, num_bytes=num_bytes))

    def _fail(self, handoff: HandoffId, error: PdserveError) -> None:
        self._forget(handoff, f"failed: {error}")
        self._local.events.put(failed(handoff, error.kind, str(error)))

    def _forget(
        self, handoff: HandoffId, end: str, error: type[TransferError] = TransferError
    ) -> None:
        """The handoff is over; frames of it that are held are rejected."""
        self._handoffs.pop(handoff, None)
        self._settled.add(handoff, end)
        for held in self._held.take(handoff):
            self._links[held.link_id].reject(held.frame.seq, error(f"the handoff {end}"))

    def _lose(self, peer_id: str, error: PdserveError) -> None:
        news = lost(peer_id, error)
        logger.warning("rank %d: no KV links from %s: %s", self._local.rank, peer_id, news.reason)
        self._local.events.put(news)
        self._drop_links(peer_id, error)

    def _drop_links(self, peer_id: str, error: PdserveError) -> None:
        """Close the links with a peer; its handoffs fail with ``error``."""
        self._finish_all()  # what they copy from is let go
        if (known := self._peers.get(peer_id)) is None:
            return
        dropped, known.links = known.links, {}
        for link_id in dropped:
            self._links.pop(link_id, None)
        self._link_of = {s: link for s, link in self._link_of.items() if link in self._links}
        self._held.keep_only(self._links)
        for incoming in [h for h in self._handoffs.values() if h.peer_id == peer_id]:
            self._fail(incoming.handoff, error)
        close_links([inbound.link for inbound in dropped.values()], peer_id)
