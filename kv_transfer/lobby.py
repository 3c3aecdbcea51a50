"""Streams that other ranks opened and that are not links yet.

A sender may greet before our own front has told us that its node is welcome: its Hello waits for
that, for a while. What does not become a link in time is closed.
"""

from dataclasses import dataclass

from kv_transfer.messages import Hello, Message
from kv_transfer.reasons import refused
from kv_transfer.transports.transport import Stream
from pdserve.core.errors import LinkDownError, PdserveError


@dataclass(slots=True)
class _Guest:
    since_s: float
    hello: Hello | None = None
    is_refused: bool = False


class Lobby:
    """Owns these streams. ``patience_s``: how long a Hello waits to be welcome."""

    def __init__(self, *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._guests: dict[Stream, _Guest] = {}

    def open(self, stream: Stream, now_s: float) -> None:
        self._guests[stream] = _Guest(now_s)

    def greet(self, stream: Stream, message: Message) -> None:
        """A message of a guest; anything but one Hello ends its stay."""
        if (guest := self._guests.get(stream)) is None or guest.is_refused:
            return
        if guest.hello is not None or not isinstance(message.body, Hello):
            self.drop(stream)
            return
        guest.hello = message.body

    def waiting(self, peer_id: str) -> list[tuple[Stream, Hello]]:
        """Guests of this peer, in the order they came."""
        return [
            (stream, guest.hello)
            for stream, guest in self._guests.items()
            if guest.hello is not None and guest.hello.peer_id == peer_id and not guest.is_refused
        ]

    def admit(self, stream: Stream) -> None:
        """The stream becomes a link."""
        del self._guests[stream]

    def refuse(self, stream: Stream, error: PdserveError) -> None:
        """Say why not; the other side closes the stream, or ``tend`` does."""
        self._guests[stream].is_refused = True
        stream.send(Message(refused(error)))

    def drop(self, stream: Stream) -> None:
        """The stream is over, or to be closed."""
        if self._guests.pop(stream, None) is not None:
            stream.close()

    def tend(self, now_s: float) -> None:
        """Refuse and close what has waited too long."""
        for stream, guest in list(self._guests.items()):
            waited_s = now_s - guest.since_s
            if waited_s > 2 * self._patience_s:
                self.drop(stream)
            elif waited_s > self._patience_s and guest.hello and not guest.is_refused:
                who = guest.hello.peer_id
                self.refuse(stream, LinkDownError(f"{who} is not welcome here (yet)"))

    def close(self) -> None:
        for stream in list(self._guests):
            self.drop(stream)
