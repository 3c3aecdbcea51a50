"""A process that ends another one by force when that does not end after a second signal.

python signal_guard.py PID AT_ONCE_S, with a socket as its standard input

It reads one byte for each signal that PID got, written by the C handler of Python's wakeup
descriptor: PID may be stuck, and hold Python's lock. By force: every process below PID is killed,
then PID. Stands alone: only the standard library, nothing of ours.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

NUMBERS = (signal.SIGINT, signal.SIGTERM)
ONCE = signal.SIGHUP  # counts as the first, and never again: a terminal that goes may say so twice
IN_ORDER, BY_FORCE = 0xF0, 0xF1  # bytes that PID itself writes: what a second signal means now
SECOND = 2


class Guard:
    """Counts; time is an argument. ``deadline_s``: when to end PID by force, if ever."""

    def __init__(self, at_once_s: float) -> None:
        self.deadline_s: float | None = None
        self._at_once_s = at_once_s
        self._num_signals = 0
        self._by_force = False

    def read(self, numbers: Iterable[int], now_s: float) -> None:
        for number in numbers:
            if number in (IN_ORDER, BY_FORCE):
                self._by_force = number == BY_FORCE
            elif number in NUMBERS or (number == ONCE and not self._num_signals):
                self._count(now_s)

    def _count(self, now_s: float) -> None:
        self._num_signals += 1
        if self._num_signals > SECOND or (self._num_signals == SECOND and self._by_force):
            self.deadline_s = now_s
        elif self._num_signals == SECOND:
            self.deadline_s = now_s + self._at_once_s


def watch(pid: int, at_once_s: float) -> None:
    """Until PID closes its end of the socket, or has to be ended."""
    guard = Guard(at_once_s)
    while True:
        now_s = time.monotonic()
        if guard.deadline_s is not None and now_s >= guard.deadline_s:
            num_killed = kill_below(pid)
            os.kill(pid, signal.SIGKILL)
            with suppress(OSError):  # the terminal may be gone
                sys.stderr.write(f"pdserve: stopped by force, {num_killed} processes killed\n")
                sys.stderr.flush()
            return
        wait_s = None if guard.deadline_s is None else guard.deadline_s - now_s
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], wait_s)
        if ready:
            numbers = os.read(sys.stdin.fileno(), 64)
            if not numbers:
                return
            guard.read(numbers, time.monotonic())


def kill_below(pid: int, spared: Collection[int] = ()) -> int:
    """Kill all processes below ``pid`` but this one, also those started meanwhile; how many."""
    spared = {*spared, os.getpid()}
    killed: set[int] = set()
    while found := [each for each in _descendants(pid) if each not in spared]:
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        killed.update(found)
    return len(killed)


def _descendants(pid: int) -> list[int]:
    """Those that run. All are found before any is killed: orphans move to another parent."""
    children = [child for child in _children(pid) if _runs(child)]
    return [*children, *(below for child in children for below in _descendants(child))]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return found


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
