"""Signals as something to wait for."""

import asyncio
import os
import signal

import pytest

from pdserve.cluster.signals import (
    StopRequestedError,
    caught_signals,
    terminating_as_interrupt,
    unless,
)


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
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    async with asyncio.timeout(5), caught_signals() as signals:
        os.kill(os.getpid(), number)
        await signals.first.wait()
        assert not signals.second.is_set()
        os.kill(os.getpid(), number)
        await signals.second.wait()
    for each, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(each, handler)


def test_sigterm_is_an_interrupt_before_there_is_a_loop() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminating_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
