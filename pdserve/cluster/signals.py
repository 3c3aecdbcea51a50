"""SIGINT and SIGTERM to wait for: the first asks to stop, the second to stop at once."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequestedError(Exception):
    """A signal came before the work was done; the work was cancelled."""


class StopSignals:
    """The signals that came so far."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def terminating_as_interrupt() -> Iterator[None]:
    """Inside the block SIGTERM, like Ctrl-C, raises KeyboardInterrupt. Main thread only."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def caught_signals() -> Iterator[StopSignals]:
    """Catch both signals inside the block, in a running loop. Main thread only.

    The loop's own way would take the wakeup descriptor from ``signal_watch.py``.
    """
    signals, loop = StopSignals(), asyncio.get_running_loop()

    def on_signal(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(signals.on_signal)

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield signals
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """What ``work`` returns. If ``stop`` comes first: cancel it, raise StopRequestedError."""
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait((working,))
        raise StopRequestedError
    finally:
        waiting.cancel()
        working.cancel()
