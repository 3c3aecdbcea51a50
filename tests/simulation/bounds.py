"""How long what nobody wants may live, looked at when that time is over and not only at the end."""

import contextvars
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Protocol

from tests.simulation.holdings import Unwanted
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.pipes import NEXT_S, Wires

AT_ONCE_S = 0.005  # what takes no time, and gRPC's own ways of ending calls


class Part(Protocol):
    """A node or a router, through all its starts."""

    @property
    def can_act(self) -> bool: ...

    @property
    def process(self) -> Process: ...


class Bounds:
    """``look`` notes what has become unwanted, and asserts that nothing else is there for long.

    A bound is a number of link delays. It begins anew when a part that has to do with the thing
    goes on after a stop, when what was held between two of them may come through, and when a
    connection between them breaks, with the word that was on its way.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        wires: Wires,
        unwanted: Callable[[], Iterable[Unwanted]],
        parts: Mapping[str, Part],
    ) -> None:
        self._loop = loop
        self._wires = wires
        self._unwanted = unwanted
        self._parts = parts
        self._since_s: dict[Hashable, float] = {}
        self._planned_s: set[float] = set()  # looks to come
        self._next_s = 0.0
        self._context = contextvars.Context()  # of no process

    def look_sometimes(self) -> None:
        """Once in each link delay, if called often."""
        if self._loop.time() >= self._next_s:
            self.look()

    def look(self) -> None:
        now_s = self._loop.time()
        self._next_s = now_s + self._wires.longest_s
        found = {item.thing: item for item in self._unwanted()}
        for thing in self._since_s.keys() - found.keys():
            del self._since_s[thing]
        for thing, item in found.items():
            if not self._can_act(item):
                self._since_s.pop(thing, None)
                continue
            if thing not in self._since_s:
                self._since_s[thing] = now_s
            over_s = self._over_s(item)
            if over_s > now_s and over_s not in self._planned_s:
                self._planned_s.add(over_s)
                self._loop.call_at(over_s + NEXT_S, self._look_again, over_s, context=self._context)
            lived_s = now_s - self._since_s[thing]
            assert now_s <= over_s, f"{lived_s:g} s later {item.among} still has: {thing}"

    def _look_again(self, planned_s: float) -> None:
        self._planned_s.remove(planned_s)
        self.look()

    def _over_s(self, item: Unwanted) -> float:
        """When it must be gone."""
        since_s = max(self._since_s[item.thing], *(self._since(one, item) for one in item.among))
        return since_s + item.num_delays * self._wires.longest_s + AT_ONCE_S

    def _since(self, name: str, item: Unwanted) -> float:
        """When this part could last begin to act."""
        others = (*item.among, *item.gone)
        disturbed_s = (self._wires.disturbed_until_s(name, other) for other in others)
        return max(self._parts[name].process.resumed_s, *disturbed_s)

    def _can_act(self, item: Unwanted) -> bool:
        return all(self._parts[name].can_act for name in item.among)
