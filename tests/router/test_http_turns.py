"""Of calls that come together the first is on its node before the last is read."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from starlette.types import Receive, Scope, Send

from router.http_turns import OneAtATime, arrived_s_of
from tests.fakes import FakeClock

STEPS = 3  # of a call, until it is on a node


class App:
    """Calls take some steps; ``seen`` has each with the round of the event loop."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []  # path, step, round
        self.round = 0
        self._ticking: asyncio.Handle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for step in range(STEPS):
            self.seen.append((scope["path"], step, self.round))
            await asyncio.sleep(0)

    def tick(self) -> None:
        self.round += 1
        self._ticking = asyncio.get_running_loop().call_soon(self.tick)

    def stop(self) -> None:
        assert self._ticking is not None
        self._ticking.cancel()

    def steps(self, step: int) -> list[tuple[str, int]]:
        """Who took this step, in which round."""
        return [(path, number) for path, taken, number in self.seen if taken == step]


async def never() -> None:
    raise AssertionError


def call(app: OneAtATime, path: str, method: str = "POST") -> asyncio.Task[None]:
    scope = {"type": "http", "method": method, "path": path}
    return asyncio.create_task(app(scope, never, never))  # type: ignore[arg-type]


@pytest.fixture
async def app() -> App:
    return App()


async def all_of(app: App, calls: Callable[[OneAtATime], list[asyncio.Task[None]]]) -> None:
    app.tick()
    await asyncio.gather(*calls(OneAtATime(app, FakeClock())), return_exceptions=True)
    app.stop()


async def test_the_first_is_done_before_the_last_begins(app: App) -> None:
    names = [str(number) for number in range(20)]
    await all_of(app, lambda turns: [call(turns, name) for name in names])
    assert [path for path, _ in app.steps(0)] == names
    rounds = [number for _, number in app.steps(0)]
    assert all(later > earlier for earlier, later in pairwise(rounds))
    assert app.seen.index(("0", STEPS - 1, rounds[0] + STEPS - 1)) < app.seen.index(
        ("19", 0, rounds[19])
    )


async def test_a_lone_caller_waits_for_nothing(app: App) -> None:
    turns = OneAtATime(app, FakeClock())
    app.tick()
    for name in ("first", "second"):
        before = app.round
        await call(turns, name)
        assert app.steps(0)[-1] == (name, before + 1)  # the round in which its task begins
        await asyncio.sleep(0)
    app.stop()


async def test_who_has_gone_keeps_nobody_waiting(app: App) -> None:
    def calls(turns: OneAtATime) -> list[asyncio.Task[None]]:
        made = [call(turns, str(number)) for number in range(9)]
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: [task.cancel() for task in made[3:7]])
        return made

    await all_of(app, calls)
    assert [path for path, _ in app.steps(0)] == ["0", "1", "2", "7", "8"]


async def test_calls_without_a_body_take_no_turn(app: App) -> None:
    names = [str(number) for number in range(5)]
    await all_of(app, lambda turns: [call(turns, name, "GET") for name in names])
    assert len({number for _, number in app.steps(0)}) == 1


async def test_a_call_came_before_it_waited(app: App) -> None:
    clock = FakeClock()
    came: list[float] = []

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        came.append(arrived_s_of(scope))
        await asyncio.sleep(0)
        clock.advance(1.0)

    turns = OneAtATime(told, clock)
    await asyncio.gather(*(call(turns, str(number)) for number in range(4)))
    assert len(set(came)) == 1
