"""Signals as something to wait for, and the second one as the end whatever the process does."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.cluster.signal_guard import BY_FORCE, IN_ORDER, Guard
from pdserve.cluster.signals import (
    SIGNALS,
    StopRequestedError,
    caught_signals,
    terminating_as_interrupt,
    unless,
)
from tests.cluster.processes import wait_until_gone


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Tests leave the process's handlers as they were, and begin as in a terminal."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_work_that_ends_first_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert await unless(asyncio.Event(), work()) == 7


async def test_work_that_fails_raises_its_error() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await unless(asyncio.Event(), work())


async def test_a_stop_cancels_the_work_and_waits_for_its_clean_up() -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    stop = asyncio.Event()
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(StopRequestedError):
        await unless(stop, work())
    assert steps == ["cleaned up"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_and_the_second_signal_are_told_apart(number: signal.Signals) -> None:
    async with asyncio.timeout(5):
        with caught_signals() as signals:
            os.kill(os.getpid(), number)
            await signals.first.wait()
            assert not signals.second.is_set()
            os.kill(os.getpid(), number)
            await signals.second.wait()


async def test_a_terminal_that_goes_away_asks_to_stop_however_often_it_says_so() -> None:
    async with asyncio.timeout(5):
        with caught_signals() as signals:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
            await signals.first.wait()
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            assert not signals.second.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            await signals.second.wait()


async def test_under_nohup_a_terminal_that_goes_away_is_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminating_as_interrupt(), caught_signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        assert not signals.first.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_sigint_is_heeded_though_a_shell_ignores_it_for_commands_in_the_background() -> None:
    """`pdserve serve & kill -INT $!` in a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    async with asyncio.timeout(5):
        with caught_signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            await signals.first.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_interrupt_before_there_is_a_loop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), terminating_as_interrupt():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("numbers", "after_s"),
    [
        ([INT], None),
        ([signal.SIGCHLD, INT], None),
        ([INT, TERM], 12.0),
        ([INT, INT, INT], 0.0),
        ([HUP, HUP, HUP], None),
        ([HUP, HUP, TERM], 12.0),
        ([INT, HUP], None),
        ([BY_FORCE, INT], None),
        ([BY_FORCE, INT, INT], 0.0),
        ([INT, BY_FORCE, TERM], 0.0),
        ([BY_FORCE, IN_ORDER, INT, INT], 12.0),
        ([BY_FORCE, INT, IN_ORDER, INT], 12.0),
    ],
)
def test_the_end_by_force_comes_with_the_second_or_third_signal(
    numbers: list[int], after_s: float | None
) -> None:
    guard = Guard(at_once_s=12.0)
    guard.read(numbers, 100.0)
    assert guard.deadline_s == (None if after_s is None else 100.0 + after_s)


STUCK = """
import ctypes, signal, subprocess, sys
from pdserve.cluster.signal_watch import watched_signals
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: None)
with watched_signals() as watch, watch.by_force():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    while True:
        ctypes.PyDLL(None).pause()  # holds Python's lock: no handler and no thread runs
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_a_stuck_process_and_what_it_started(first: signal.Signals) -> None:
    """Also where nobody reads any more what is said about it."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", STUCK]
    with (
        os.fdopen(writing, "w") as nowhere,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=nowhere) as stuck,
    ):
        assert stuck.stdout is not None
        child = int(stuck.stdout.readline())
        stuck.send_signal(first)
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(timeout=0.5)
        stuck.send_signal(signal.SIGTERM)
        assert stuck.wait(timeout=5) == -signal.SIGKILL
    assert wait_until_gone({child: "child"}, timeout_s=5) == {}
