"""A measurement that is told to end ends what it has started."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pdserve.bench.termination import ignoring_interrupts, interrupted_by_sigterm


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Shells start what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_is_started_inside_ignores_an_interrupt_and_its_owner_does_not() -> None:
    says = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    with ignoring_interrupts():
        process = subprocess.Popen([sys.executable, "-c", says], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=30)[0] == "True\n"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_sigterm_interrupts_inside_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


STARTS_A_PROCESS = """
import subprocess, sys
from pdserve.bench.termination import interrupted_by_sigterm
with interrupted_by_sigterm():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        print(child.pid, flush=True)
        child.wait(60)
    finally:
        child.terminate()
        child.wait(60)
"""


def test_what_was_started_does_not_outlive_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_PROCESS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        process.terminate()
        assert process.wait(30) != 0
    assert not psutil.pid_exists(child_pid)
