"""SIGTERM for measurements that start processes of their own: they end those, as on Ctrl-C."""

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
