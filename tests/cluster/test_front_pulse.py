"""When a front that does not answer is given up: in time that is a number."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.cluster.front_pulse import FrontWatch
from pdserve.core.errors import NodeLostError, PdserveError
from pdserve.core.starvation import ProcessId
from tests.simulation.loop import VirtualLoop

PROCESS = ProcessId(pid=4711, world="here")


@dataclass
class FakeFront:
    """Answers until ``silent_from_s``, or ends then."""

    silent_from_s: float
    dies: bool = False
    name: str = "decode-0"

    def start_call(self, method: str) -> "asyncio.Future[Any]":
        assert method == "alive"
        loop = asyncio.get_running_loop()
        call = loop.create_future()
        if loop.time() < self.silent_from_s:
            call.set_result(None)
        elif self.dies:
            call.set_exception(NodeLostError("decode-0: its process died"))
        return call

    async def answer(self, call: "asyncio.Future[Any]") -> object:
        return await call


@dataclass
class FakeStarvation:
    """What the host says of the front's process from some time on."""

    from_s: float
    until_s: float
    asked: list[ProcessId] = field(default_factory=list)

    def starves(self, process: ProcessId, now_s: float) -> bool:
        self.asked.append(process)
        return self.from_s <= now_s < self.until_s


NEVER = FakeStarvation(from_s=0.0, until_s=0.0)


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close_down()


def given_up(
    loop: VirtualLoop, front: FakeFront, starvation: FakeStarvation
) -> tuple[float, PdserveError]:
    """After how many seconds of silence, and why."""
    watch = FrontWatch(process=PROCESS, limit_s=10.0, starvation=starvation)
    error = loop.run_until_complete(watch.silent(front))
    return loop.time() - front.silent_from_s, error


def test_a_front_that_is_stopped_is_given_up_at_the_limit(loop: VirtualLoop) -> None:
    silent_s, error = given_up(loop, FakeFront(silent_from_s=100.0), NEVER)
    assert 9.0 <= silent_s <= 12.0, "a second after its last answer"
    assert str(error) == "decode-0: nothing heard for 10 s: it is stopped"


def test_a_front_whose_process_died_is_given_up_at_once(loop: VirtualLoop) -> None:
    silent_s, error = given_up(loop, FakeFront(silent_from_s=100.0, dies=True), NEVER)
    assert silent_s <= 1.0
    assert "its process died" in str(error)


def test_a_front_that_starves_is_given_longer(loop: VirtualLoop) -> None:
    starvation = FakeStarvation(from_s=100.0, until_s=140.0)
    silent_s, _ = given_up(loop, FakeFront(silent_from_s=100.0), starvation)
    assert 45.0 <= silent_s <= 51.0, "40 s of it starved, less those before it was looked at"
    assert set(starvation.asked) == {PROCESS}


def test_a_front_that_starves_for_ever_is_given_up_in_the_end(loop: VirtualLoop) -> None:
    starvation = FakeStarvation(from_s=0.0, until_s=1e9)
    silent_s, _ = given_up(loop, FakeFront(silent_from_s=100.0), starvation)
    assert 59.0 <= silent_s <= 62.0


def test_while_it_answers_its_host_is_not_asked(loop: VirtualLoop) -> None:
    starvation = FakeStarvation(from_s=0.0, until_s=1e9)
    watch = FrontWatch(process=PROCESS, limit_s=10.0, starvation=starvation)

    async def watched_for_a_while() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.silent(FakeFront(silent_from_s=1e9)), 1000)

    loop.run_until_complete(watched_for_a_while())
    assert starvation.asked == []
