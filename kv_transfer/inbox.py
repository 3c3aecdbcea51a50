"""What an endpoint's thread waits for: what others put in, and what other processes say on lines.

    other threads ── put ──> queue, bell ──┐
    other processes ── lines ──> Sources ──┴──> take, by the endpoint's thread

A message on a line is read by the waiting thread itself: no other has to wake up first.
"""

import selectors
import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Source(Protocol[T]):
    """Has something to read now and then."""

    def fileno(self) -> int: ...

    def read(self) -> list[T]:
        """What came; called when the file can be read, and never waits."""


class Sources(Generic[T]):
    """Owns which sources are watched. All calls are the waiting thread's."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, source: Source[T]) -> None:
        self._selector.register(source.fileno(), selectors.EVENT_READ, source)

    def forget(self, source: Source[T]) -> None:
        self._selector.unregister(source.fileno())

    def read(self, timeout_s: float) -> list[T]:
        """What came, as soon as something has; nothing after the timeout."""
        ready: list[Source[T]] = [key.data for key, _ in self._selector.select(timeout_s)]
        return [item for source in ready for item in source.read()]


class Inbox(Generic[T]):
    """``sources`` may be watched by others too, from the thread that takes."""

    def __init__(self, sources: Sources[T]) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self._sources = sources
        self._bell: _Bell[T] = _Bell()
        self._is_open = True
        sources.watch(self._bell)

    def put(self, item: T) -> None:
        """From any thread."""
        self._queue.put(item)
        self._bell.ring()

    def take(self, timeout_s: float) -> list[T]:
        """All that has come, or comes first within the time; may be nothing."""
        items = self._drain()
        items += self._sources.read(0.0 if items else timeout_s)
        return items or self._drain()

    def close(self) -> None:
        """What is put in from now on is nobody's. May be called again."""
        if self._is_open:
            self._is_open = False
            self._sources.forget(self._bell)
            self._bell.close()

    def _drain(self) -> list[T]:
        items: list[T] = []
        with suppress(Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items


class _Bell(Generic[T]):
    """Wakes who waits for sources."""

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)

    def ring(self) -> None:
        with suppress(OSError):  # full: it rings; closed: nobody is there
            self._outside.send(b"\0")

    def fileno(self) -> int:
        return self._inside.fileno()

    def read(self) -> list[T]:
        with suppress(BlockingIOError):
            self._inside.recv(4096)
        return []

    def close(self) -> None:
        self._inside.close()
        self._outside.close()
