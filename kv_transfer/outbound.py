"""The sender's end of one link: its handshake, the frames that are not yet answered, its deadlines.

    GREETING ──Hello──> WARMING ──Warm──> UP

A frame counts against the window, and against the deadline, until it is answered. While it waits
for the turn of another link, that one's deadline counts.
"""

from dataclasses import dataclass
from enum import Enum, auto

from kv_transfer.commands import Peer
from kv_transfer.frame_queue import LinkId
from kv_transfer.local_rank import LocalRank, check_hello, check_rank
from kv_transfer.messages import Frame, Heartbeat, Hello, Message, Refused, Warm, checksum
from kv_transfer.outgoing import Outgoing
from kv_transfer.payload import Payload, allocating
from kv_transfer.transports.transport import Link, Payloads
from pdserve.core.errors import LinkDownError, TransferTimeoutError
from pdserve.core.request import HandoffId

WARM_BYTES = 16 << 20  # make a link come up; many may at once, on a GPU that is full


class _Phase(Enum):
    GREETING = auto()
    WARMING = auto()
    UP = auto()


@dataclass(frozen=True, slots=True)
class InFlight:
    """A frame that is not answered yet."""

    handoff: HandoffId
    num_bytes: int
    sent_s: float


class OutboundLink:
    """``heads`` are those of this rank that the link carries."""

    def __init__(
        self, link: Link, link_id: LinkId, heads: range, local: LocalRank, transport: str
    ) -> None:
        self.link = link
        self.link_id = link_id
        self.heads = heads
        self._local = local
        self._frames = local.frames(transport)
        self._phase = _Phase.GREETING
        self._opened_s = self._heard_s = self._spoke_s = local.clock.now_s()
        self._waited_s = self._opened_s  # until then, as far as was seen, for another link's turn
        self._in_flight: dict[int, InFlight] = {}
        self._next_seq = 0

    @property
    def is_up(self) -> bool:
        return self._phase is _Phase.UP

    @property
    def has_room(self) -> bool:
        return self.is_up and len(self._in_flight) < self._frames.window

    def greet(self, peer: Peer) -> None:
        """Say hello to a rank of ``peer``."""
        self._send(Message(self._local.hello(peer.transport)))

    def shake_hands(self, peer: Peer, message: Message) -> bool:
        """A message came before the link was up. True if the link is up now.

        Raises HandshakeError or LinkDownError if it is not what makes the link come up,
        TransferError if there is no memory for a first payload.
        """
        match self._phase, message.body:
            case _Phase.GREETING, Hello() as hello:
                check_hello(peer, hello)
                check_rank(self.link_id.rank, hello)
                self._phase = _Phase.WARMING
                self._send(Message(Warm(), self._blank()))
            case _Phase.GREETING, Refused(message=reason):
                raise LinkDownError(f"refused by the receiver: {reason}")
            case _Phase.WARMING, Warm():
                self._phase = _Phase.UP
                self._send(Message(Heartbeat()))
            case phase, body:
                raise LinkDownError(f"unexpected {type(body).__name__} while {phase.name}")
        return self.is_up

    def send_next(self, outgoing: Outgoing) -> int:
        """Send the handoff's next frame over this link; returns its payload's bytes.

        Raises TransferError if there is no memory for them.
        """
        pieces, heads = outgoing.next_frame(self.link_id)
        first = self.heads.start
        payload = self._take_up(outgoing, pieces, range(first + heads.start, first + heads.stop))
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        handoff = outgoing.handoff
        frame = Frame(
            seq=seq,
            handoff=handoff,
            pieces=pieces,
            heads=heads,
            checksum=checksum(handoff, pieces, heads, payload),
        )
        self._in_flight[seq] = InFlight(handoff, len(payload), self._local.clock.now_s())
        self._send(Message(frame, payload))
        return len(payload)

    def answered(self, seq: int) -> InFlight:
        """The frame that an answer is for. Raises LinkDownError if there is none."""
        if (frame := self._in_flight.pop(seq, None)) is None:
            raise LinkDownError(f"an answer to frame {seq}, which was not sent or is answered")
        self.link.take_back(seq)
        return frame

    def take_back(self, handoff: HandoffId) -> None:
        """The blocks of this handoff's frames may change from now on."""
        for seq, frame in self._in_flight.items():
            if frame.handoff == handoff:
                self.link.take_back(seq)

    def heard(self) -> None:
        """Something came from the other side."""
        self._heard_s = self._local.clock.now_s()

    def check(self, now_s: float) -> None:
        """Speak up if it was quiet. Raises TransferTimeoutError if the other side is too late."""
        self.link.check(now_s)
        timeout_s = self._local.timeout_s
        if self.link.is_waiting:
            self._waited_s = now_s
        oldest = min((frame.sent_s for frame in self._in_flight.values()), default=now_s)
        if not self.is_up and now_s - max(self._opened_s, self._waited_s) > timeout_s:
            raise TransferTimeoutError(f"the link did not come up within {timeout_s} s")
        if now_s - max(oldest, self._waited_s) > timeout_s:
            raise TransferTimeoutError(f"a frame was not delivered within {timeout_s} s")
        if now_s - self._heard_s > timeout_s:
            raise TransferTimeoutError(f"the receiver was silent for {timeout_s} s")
        if self.is_up and now_s - self._spoke_s > self._local.heartbeat_s:
            self._send(Message(Heartbeat()))

    def _send(self, message: Message) -> None:
        self._spoke_s = self._local.clock.now_s()
        self.link.send(message)

    def _blank(self) -> Payload | None:
        if self.link.payloads is Payloads.LENT:
            return None
        with allocating():
            return self._fit(self._local.pieces.blank(min(self._frames.num_bytes, WARM_BYTES)))

    def _take_up(self, outgoing: Outgoing, pieces: range, heads: range) -> Payload:
        """Copy the pieces out of the cache, or say where they are."""
        if self.link.payloads is Payloads.LENT:
            return outgoing.lend(pieces, heads)
        with allocating():
            payload = self._local.pieces.gather(outgoing.blocks, pieces, heads, unit=outgoing.unit)
            return self._fit(payload)

    def _fit(self, payload: Payload) -> Payload:
        on_device = self.link.payloads is Payloads.ON_DEVICE
        return payload if on_device else self._local.pieces.in_host_memory(payload)
