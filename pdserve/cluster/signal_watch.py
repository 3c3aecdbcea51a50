"""What a second signal means (``signals.py``), whatever this process is stuck in.

    first    the business of whoever catches it
    second   all ends in order within ``AT_ONCE_S``, else by force; by force now while ``by_force``
    third    by force now

Python runs signal handlers in the main thread between two of its instructions, and threads not at
all while Ray holds its lock. So another process counts (``signal_guard.py``): the C handler writes
to the wakeup descriptor at once.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.cluster import signal_guard

AT_ONCE_S = 12.0  # more than killing in order takes at worst


class SignalWatch:
    """Made by ``watched_signals``."""

    def __init__(self, guard: socket.socket, guard_pid: int) -> None:
        self.guard_pid = guard_pid
        self._guard = guard

    def end_soon(self) -> None:
        """As if both signals had come: this process ends in order within ``at_once_s``, or by
        force.
        """
        self._guard.send(bytes(signal_guard.NUMBERS))

    @contextmanager
    def by_force(self) -> Iterator[None]:
        """Inside the block nothing could be ended in order."""
        self._guard.send(bytes([signal_guard.BY_FORCE]))
        try:
            yield
        finally:
            self._guard.send(bytes([signal_guard.IN_ORDER]))


@contextmanager
def watched_signals(at_once_s: float = AT_ONCE_S) -> Iterator[SignalWatch]:
    """Watch inside the block. Main thread only; the signals need some handler of Python's."""
    ours, guards = socket.socketpair()
    ours.setblocking(False)
    command = [sys.executable, "-I", "-S", signal_guard.__file__, str(os.getpid()), str(at_once_s)]
    guard = subprocess.Popen(command, stdin=guards.fileno(), start_new_session=True)
    guards.close()
    before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    try:
        yield SignalWatch(ours, guard.pid)
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        guard.wait()
