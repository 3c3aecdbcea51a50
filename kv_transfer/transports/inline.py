"""A link whose payloads travel inside the messages."""

from kv_transfer.messages import Message
from kv_transfer.payload import Lent
from kv_transfer.transports.transport import (
    Arrived,
    LinkSetting,
    PairMet,
    PayloadCame,
    Payloads,
    Stream,
)
from pdserve.core.errors import LinkDownError


class InlineLink:
    """Leaves everything to the stream."""

    payloads = Payloads.IN_HOST_MEMORY
    is_waiting = False

    def __init__(self, stream: Stream, setting: LinkSetting) -> None:
        self._stream = stream

    def send(self, message: Message) -> None:
        self._stream.send(message)

    def take_back(self, seq: int) -> None:
        """Nothing is lent: what was sent is a copy."""

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        if not isinstance(event, Arrived) or event.message.announced is not None:
            raise LinkDownError("a payload out of band on a link that carries them inside")
        if isinstance(event.message.payload, Lent):
            raise LinkDownError("a payload to be fetched on a link that carries them inside")
        return event.message

    def check(self, now_s: float) -> None:
        """Nothing is under way here that could be overdue."""

    def close(self) -> None:
        self._stream.close()
