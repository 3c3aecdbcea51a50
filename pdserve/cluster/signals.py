"""Signals to wait for: the first asks to stop, the second to stop at once.

SIGHUP, of a terminal that goes away, may come twice and asks only to stop; under nohup it is
ignored, and stays so. What a shell ignores for commands in the background, SIGINT, is meant.
"""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequestedError(Exception):
    """A signal came before the work was done; the work was cancelled."""


class StopSignals:
    """The signals that came so far."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def on_signal(self, number: int) -> None:
        if self.first.is_set() and number != signal.SIGHUP:
            self.second.set()
        self.first.set()


def heeded() -> list[signal.Signals]:
    """Those of ``SIGNALS`` that are to be acted on."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (is_nohup and number == signal.SIGHUP)]


@contextmanager
def terminating_as_interrupt() -> Iterator[None]:
    """Inside the block each of them, like Ctrl-C, raises KeyboardInterrupt. Main thread only."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def caught_signals() -> Iterator[StopSignals]:
    """Catch them inside the block, in a running loop. Main thread only.

    The loop's own way would take the wakeup descriptor from ``signal_watch.py``.
    """
    signals, loop = StopSignals(), asyncio.get_running_loop()

    def on_signal(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(signals.on_signal, number)

    numbers = heeded()
    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield signals
    finally:
        for number in numbers:
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
