"""Wires whose messages a test may hold back, change, double or see."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock
from typing import Protocol, cast

from kv_transfer.messages import Body, Message
from kv_transfer.transports.transport import Opened, Stream, StreamEvent, StreamEvents, Wire
from tests.kv_transfer.nodes import OpenWire

Send = Callable[[Message], None]


class Tamper(Protocol):
    """Does with a message of a stream what it likes; ``send`` sends one."""

    def __call__(self, send: Send, message: Message) -> None: ...


def tampered(open_wire: OpenWire, tamper: Tamper) -> OpenWire:
    """A wire whose own endpoint's messages all go through ``tamper``."""

    def open_tampered(events: StreamEvents) -> Wire:
        wire = open_wire(cast("StreamEvents", _Events(events, tamper)))
        connect = wire.connect

        def connect_tampered(address: str) -> Stream:
            stream = connect(address)
            _take_over(stream, tamper)
            return stream

        setattr(wire, "connect", connect_tampered)  # noqa: B010 - mypy forbids the assignment
        return wire

    return open_tampered


class Gate:
    """Holds back messages of one kind while it is shut."""

    def __init__(self, kind: type[Body]) -> None:
        self.held: SimpleQueue[tuple[Send, Message]] = SimpleQueue()
        self._kind = kind
        self._is_shut = False
        self._lock = Lock()

    def __call__(self, send: Send, message: Message) -> None:
        with self._lock:
            if self._is_shut and isinstance(message.body, self._kind):
                self.held.put((send, message))
                return
        send(message)

    def shut(self) -> None:
        self._is_shut = True

    def open(self) -> int:
        """Let everything pass that was held; returns how many messages that were."""
        with self._lock:
            self._is_shut = False
            number = self.held.qsize()
            for _ in range(number):
                send, message = self.held.get()
                send(message)
        return number


class _Events:
    """In place of an endpoint's queue: takes over streams that others open."""

    def __init__(self, events: StreamEvents, tamper: Tamper) -> None:
        self._events = events
        self._tamper = tamper

    def put(self, event: StreamEvent) -> None:
        if isinstance(event, Opened):
            _take_over(event.stream, self._tamper)
        self._events.put(event)


def _take_over(stream: Stream, tamper: Tamper) -> None:
    send = stream.send
    setattr(stream, "send", lambda message: tamper(send, message))  # noqa: B010
