"""What nobody wants is found when its time is over, and not before."""

from dataclasses import dataclass, field, replace

import pytest

from tests.simulation.bounds import AT_ONCE_S, Bounds
from tests.simulation.holdings import Unwanted
from tests.simulation.loop import Life, Process, VirtualLoop
from tests.simulation.pipes import Wires

DELAY_S = 0.1
BOUND_S = 2 * DELAY_S + AT_ONCE_S
THING = Unwanted(thing="a block", num_delays=2, among=("one", "other"))


@dataclass(frozen=True)
class Part:
    process: Process

    @property
    def can_act(self) -> bool:
        return self.process.life is Life.RUNNING


@dataclass
class World:
    """Two parts, and what they hold for nobody."""

    loop: VirtualLoop = field(default_factory=VirtualLoop)
    things: list[Unwanted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wires = Wires(self.loop, longest_s=DELAY_S, seed=0)
        self.parts = {name: Part(self.loop.process(name)) for name in ("one", "other")}
        self.bounds = Bounds(self.loop, self.wires, lambda: self.things, self.parts)

    def run(self, until_s: float) -> list[str]:
        """What was wrong until then."""
        self.bounds.look()
        self.loop.call_at(until_s, self.loop.stop)
        self.loop.run_forever()
        return self.loop.problems


@pytest.fixture
def world():
    world = World()
    yield world
    world.loop.close_down()


def test_what_stays_is_found_when_its_time_is_over(world: World) -> None:
    world.things.append(THING)
    assert not world.run(BOUND_S - 0.001)
    (problem,) = world.run(BOUND_S + 0.001)
    assert "('one', 'other') still has: a block" in problem


def test_what_goes_in_time_is_not_found(world: World) -> None:
    world.things.append(THING)
    world.loop.call_at(BOUND_S - 0.001, world.things.clear)
    assert not world.run(1.0)


def test_what_comes_again_has_its_time_again(world: World) -> None:
    world.things.append(THING)
    world.loop.call_at(BOUND_S - 0.02, world.things.clear)
    world.loop.call_at(BOUND_S - 0.01, world.bounds.look)
    world.loop.call_at(BOUND_S, world.things.append, THING)
    world.loop.call_at(BOUND_S, world.bounds.look)
    assert not world.run(2 * BOUND_S - 0.01)
    assert world.run(2 * BOUND_S + 0.01)


def test_the_time_of_a_stop_does_not_count(world: World) -> None:
    world.things.append(THING)
    world.parts["other"].process.stop()
    assert not world.run(5.0)
    world.parts["other"].process.go_on()
    assert not world.run(5.0 + BOUND_S - 0.001)
    assert world.run(5.0 + BOUND_S + 0.001)


def test_the_time_of_a_word_that_is_held_does_not_count(world: World) -> None:
    world.things.append(THING)
    world.wires.hold("one", "other", 5.0)
    assert not world.run(5.0 + BOUND_S - 0.001)
    assert world.run(5.0 + BOUND_S + 0.001)


def test_news_of_who_is_gone_may_be_held_too(world: World) -> None:
    world.things.append(replace(THING, among=("one",), gone=("other",)))
    world.parts["other"].process.die()
    world.wires.hold("one", "other", 5.0)
    assert not world.run(5.0 + BOUND_S - 0.001)
    assert world.run(5.0 + BOUND_S + 0.001)


def test_a_connection_that_breaks_may_take_the_word_with_it(world: World) -> None:
    connection = world.wires.connect(*(part.process for part in world.parts.values()))
    connection.up.receive = connection.down.receive = lambda item: None
    world.things.append(THING)
    world.loop.call_at(0.15, world.wires.cut, connection, "over")
    assert not world.run(0.15 + BOUND_S - 0.001)
    assert world.run(0.15 + BOUND_S + 0.001)
