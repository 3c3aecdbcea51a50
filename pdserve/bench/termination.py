"""Signals for measurements that start processes of their own: they end those, whatever the signal,
and those do not end by themselves.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """In the main thread; SIGTERM raises KeyboardInterrupt inside the block."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """In the main thread; a process that is started inside the block ignores Ctrl-C, which a
    terminal sends to all of them: its owner ends it.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
