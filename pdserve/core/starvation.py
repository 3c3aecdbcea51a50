"""Whether a silent process of this host starves: it wants to run, and others have the CPUs.

What the kernel says of its threads (``/proc``) tells that from a process that is stopped, waits for
something that never comes, or runs in circles:

    some thread is ready to run, and has not run since the last look    it starves
    none is, or whichever is has run                                    its silence is its own

Where nothing can be seen (another host, another system than Linux), nobody starves.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEAST_SHARE = 0.5  # of a CPU; a ready thread that had less wants for it
_STALE_S = 5.0  # after a look, before the next; they say nothing together


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, with what its number counts in: boot and namespace, none where that is unknown."""

    pid: int
    world: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """Of one thread at one time."""

    is_ready: bool  # it runs, or would if it were let
    ran_s: float  # since it began


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All threads of a process by their number, at one time."""

    at_s: float
    threads: Mapping[int, ThreadState]


class Starvation(Protocol):
    """What tells who starves."""

    def starves(self, process: ProcessId, now_s: float) -> bool:
        """Whether it starved since the last call for it; False at the first."""


class KernelStarvation:
    """A ``Starvation`` that asks the kernel. A look costs about a millisecond."""

    def __init__(self) -> None:
        self._world = own_process().world
        self._looks: dict[ProcessId, Look] = {}

    def starves(self, process: ProcessId, now_s: float) -> bool:
        if self._world is None or process.world != self._world:
            return False
        look = Look(at_s=now_s, threads=_threads(process.pid))
        self._looks = {
            each: seen for each, seen in self._looks.items() if now_s - seen.at_s <= _STALE_S
        }
        before = self._looks.get(process)
        self._looks[process] = look
        return before is not None and starved_between(before, look)


def starved_between(before: Look, after: Look) -> bool:
    """Whether some thread is ready now and had less than its share of a CPU in between."""
    least_s = _LEAST_SHARE * (after.at_s - before.at_s)
    return any(
        thread.is_ready and thread.ran_s - before.threads[number].ran_s < least_s
        for number, thread in after.threads.items()
        if number in before.threads
    )


def own_process() -> ProcessId:
    """The process that asks."""
    return ProcessId(pid=os.getpid(), world=_own_world())


def _own_world() -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def _threads(pid: int) -> dict[int, ThreadState]:
    """Those that are there when it is their turn; none of a process that is gone."""
    threads = {}
    try:
        for folder in (_PROC / str(pid) / "task").iterdir():
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            threads[int(folder.name)] = ThreadState(
                is_ready=fields[0] == b"R", ran_s=ticks / _TICKS_PER_S
            )
    except OSError:
        pass
    return threads
