"""Clients that take nothing are noticed; those that do, and those that leave, are not mistaken."""

import asyncio
import re

import pytest

from router.stall import StallWatch

STALL_S = 0.04


async def wait_for_ever(stall_s: float) -> None:
    with StallWatch(stall_s) as watch:
        watch.waits()
        await asyncio.Event().wait()


async def test_who_waits_too_long_is_told_so() -> None:
    with pytest.raises(TimeoutError, match=re.escape("0.04 s")):
        await wait_for_ever(STALL_S)
    await asyncio.sleep(0)  # the task goes on as if it had not been cancelled
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_many_short_waits_are_no_long_one() -> None:
    with StallWatch(STALL_S) as watch:
        for _ in range(8):
            watch.waits()
            await asyncio.sleep(STALL_S / 4)
            watch.goes_on()


async def test_time_in_which_nobody_is_waited_for_does_not_count() -> None:
    with StallWatch(STALL_S):
        await asyncio.sleep(3 * STALL_S)


async def test_a_task_that_others_end_is_ended() -> None:
    task = asyncio.create_task(wait_for_ever(60.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
