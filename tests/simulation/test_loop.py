"""Time that jumps, and processes that are stopped and killed."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.simulation.loop import FAR_S, StuckError, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.close_down()


def ticking(loop, process, period_s=1.0):
    """What a process notes every second, by the loop's time."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(period_s)
            ticks.append(loop.time())

    process.run(tick(), "ticks")
    return ticks


def test_an_hour_passes_at_once(loop):
    ticks = ticking(loop, loop.process("one"))
    loop.run_until_complete(asyncio.sleep(3600.5))
    assert ticks == pytest.approx(range(1, 3601))


def test_who_waits_for_nothing_is_found(loop):
    with pytest.raises(StuckError):
        loop.run_until_complete(asyncio.Event().wait())


def test_a_stopped_process_does_nothing_and_then_all_that_came_due(loop):
    stopped, other = loop.process("stopped"), loop.process("other")
    ticks, others = ticking(loop, stopped), ticking(loop, other)
    heard: list[tuple[str, float]] = []
    loop.call_later(2.5, stopped.stop)
    for name, at_s in (("late", 4.0), ("cancelled", 5.0)):
        note = lambda name=name: heard.append((name, loop.time()))  # noqa: E731
        timer = loop.call_at(at_s, note, context=stopped.context)
        if name == "cancelled":
            loop.call_later(6.0, timer.cancel)
    loop.call_later(7.25, stopped.go_on)
    loop.run_until_complete(asyncio.sleep(8.5))
    assert ticks == pytest.approx([1.0, 2.0, 7.25, 8.25])
    assert others == pytest.approx(range(1, 9))
    assert heard == [("late", 7.25)]


def test_a_dead_process_never_does_anything_again(loop):
    process = loop.process("dead")
    ticks = ticking(loop, process)
    loop.call_later(2.5, process.die)
    loop.call_later(3.5, process.go_on)
    loop.run_until_complete(asyncio.sleep(8.5))
    assert ticks == pytest.approx([1.0, 2.0])


def test_what_a_process_begins_is_its_own(loop):
    process = loop.process("one")
    seen: list[str] = []

    async def child() -> None:
        await asyncio.sleep(1.0)
        seen.append("child")

    async def parent() -> None:
        await asyncio.gather(child(), asyncio.create_task(child()))

    process.run(parent(), "parent")
    loop.call_later(0.5, process.die)
    loop.run_until_complete(asyncio.sleep(5.0))
    assert not seen


def test_clocks_of_two_processes_have_nothing_in_common(loop):
    one, other = loop.process("one"), loop.process("other")
    assert abs(one.now_s() - other.now_s()) >= FAR_S


def test_what_is_due_at_one_time_comes_in_the_order_in_which_it_was_planned(loop):
    heard: list[int] = []
    for number in range(200):
        loop.call_at(5.0 + number % 3, heard.append, number)
    loop.call_at(9.0, loop.stop)
    loop.run_forever()
    assert heard == sorted(range(200), key=lambda number: (number % 3, number))
