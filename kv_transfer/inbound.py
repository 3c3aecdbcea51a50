"""The receiver's end of one link: its handshake, answers and deadline.

WARMING ──Warm──> WARMED ──Heartbeat──> UP
"""

from enum import Enum, auto

from kv_transfer.frame_queue import LinkId
from kv_transfer.local_rank import LocalRank
from kv_transfer.messages import Delivered, Heartbeat, Message, Warm
from kv_transfer.reasons import rejected
from kv_transfer.transports.transport import Link
from pdserve.core.errors import LinkDownError, PdserveError, TransferTimeoutError


class _Phase(Enum):
    WARMING = auto()
    WARMED = auto()
    UP = auto()


class InboundLink:
    """Made when a sender's Hello was found right. ``link_id`` names the sender rank."""

    def __init__(self, link: Link, link_id: LinkId, transport: str, local: LocalRank) -> None:
        self.link = link
        self.link_id = link_id
        self._local = local
        self._phase = _Phase.WARMING
        self._heard_s = local.clock.now_s()
        link.send(Message(local.hello(transport)))

    @property
    def is_up(self) -> bool:
        return self._phase is _Phase.UP

    def shake_hands(self, message: Message) -> bool:
        """A message came before the link was up. True if the link is up now.

        Raises LinkDownError if it is not what makes the link come up.
        """
        match self._phase, message.body:
            case _Phase.WARMING, Warm() as warm:
                self._phase = _Phase.WARMED
                self.link.send(Message(warm, message.payload))
            case _Phase.WARMED, Heartbeat():
                self._phase = _Phase.UP
            case phase, body:
                raise LinkDownError(f"unexpected {type(body).__name__} while {phase.name}")
        return self.is_up

    def deliver(self, seq: int) -> None:
        """The frame is in the blocks."""
        self.link.send(Message(Delivered(seq)))

    def reject(self, seq: int, error: PdserveError) -> None:
        """The frame was dropped and its handoff fails."""
        self.link.send(Message(rejected(seq, error)))

    def answer_heartbeat(self) -> None:
        self.link.send(Message(Heartbeat()))

    def heard(self) -> None:
        """Something came from the other side."""
        self._heard_s = self._local.clock.now_s()

    def check(self, now_s: float) -> None:
        """Raises TransferTimeoutError if the other side is too late."""
        self.link.check(now_s)
        timeout_s = self._local.timeout_s
        if now_s - self._heard_s > timeout_s:
            raise TransferTimeoutError(f"the sender was silent for {timeout_s} s")
