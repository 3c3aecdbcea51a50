"""Who starves: told by the kernel of this host, of processes that really run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pdserve.core.starvation import (
    KernelStarvation,
    Look,
    ProcessId,
    ThreadState,
    own_process,
    starved_between,
)

Start = Callable[[str, int], ProcessId]

ON_ONE_CPU = "import os\nos.nice({nice})\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\n"
FOREVER = {"spins": "while True: pass", "sleeps": "import time\ntime.sleep(600)"}


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that spins or sleeps on one CPU; none outlives the test."""
    children: list[subprocess.Popen[bytes]] = []
    cpu = min(os.sched_getaffinity(0))

    def started(what: str, nice: int) -> ProcessId:
        code = ON_ONE_CPU.format(nice=nice, cpu=cpu) + FOREVER[what]
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return replace(own_process(), pid=child.pid)

    yield started
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def starves(process: ProcessId, during_s: float = 0.5) -> bool:
    starvation = KernelStarvation()
    assert not starvation.starves(process, time.monotonic()), "nothing is known at the first look"
    time.sleep(during_s)
    return starvation.starves(process, time.monotonic())


def test_a_process_whose_cpu_others_have_starves(start: Start) -> None:
    hungry = start("spins", 19)
    start("spins", 0)
    start("spins", 0)
    assert starves(hungry)


def test_a_stopped_one_does_not_though_others_have_its_cpu(start: Start) -> None:
    stopped = start("spins", 19)
    start("spins", 0)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert not starves(stopped)


def test_one_that_waits_for_something_does_not(start: Start) -> None:
    waiting = start("sleeps", 19)
    start("spins", 0)
    assert not starves(waiting)


def test_of_another_host_or_of_one_that_is_gone_nothing_is_known(start: Start) -> None:
    hungry = start("spins", 19)
    start("spins", 0)
    start("spins", 0)
    assert not starves(replace(hungry, world="another boot"))
    assert not starves(replace(hungry, world=None))
    os.kill(hungry.pid, signal.SIGKILL)
    os.waitpid(hungry.pid, 0)  # it has to get the CPU once more to end
    assert not starves(hungry)


@pytest.mark.parametrize(
    ("is_ready", "ran_s", "starved"),
    [
        (True, 0.0, True),
        (True, 0.4, True),
        (True, 0.6, False),  # it runs in circles, on a CPU of its own
        (False, 0.0, False),  # it waits for something
    ],
)
def test_one_ready_thread_without_a_cpu_is_enough(
    is_ready: bool, ran_s: float, starved: bool
) -> None:
    def look(at_s: float, ran_s: float) -> Look:
        threads = {
            1: ThreadState(is_ready=False, ran_s=3.0),
            2: ThreadState(is_ready=is_ready, ran_s=7.0 + ran_s),
        }
        return Look(at_s=at_s, threads=threads)

    assert starved_between(look(10.0, 0.0), look(11.0, ran_s)) is starved


def test_nothing_is_kept_of_a_process_that_is_not_asked_about_any_more() -> None:
    gone, starvation = replace(own_process(), pid=os.getpid()), KernelStarvation()
    held = sys.getrefcount(gone)
    starvation.starves(gone, 0.0)
    assert sys.getrefcount(gone) > held
    starvation.starves(replace(gone, pid=1), 60.0)
    assert sys.getrefcount(gone) == held


def test_a_look_that_is_long_ago_says_nothing(start: Start) -> None:
    hungry = start("spins", 19)
    start("spins", 0)
    start("spins", 0)
    starvation = KernelStarvation()
    starvation.starves(hungry, 0.0)
    time.sleep(0.5)
    assert not starvation.starves(hungry, 60.0)
