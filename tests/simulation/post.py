"""What the ranks of a simulation do, and their KV links: late, and looked at after every event."""

import contextvars
from collections.abc import Callable, Hashable
from random import Random

from tests.post import Deliver
from tests.simulation.loop import VirtualLoop
from tests.simulation.pipes import NEXT_S


class LatePost:
    """Brings each thing after a delay of up to ``longest_s``, those of a queue in order.

    Ranks are processes beside their front: they go on while that is stopped.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        *,
        longest_s: float,
        seed: int,
        brought: Callable[[Hashable], None],
    ) -> None:
        self._loop = loop
        self._longest_s = longest_s
        self._seed = seed
        self._randoms: dict[Hashable, Random] = {}  # one for each queue, whatever others do
        self._brought = brought
        self._last_s: dict[Hashable, float] = {}
        self._context = contextvars.Context()  # of no front

    def put(self, queue: Hashable, deliver: Deliver) -> None:
        if (random := self._randoms.get(queue)) is None:
            random = self._randoms[queue] = Random(f"{self._seed} {queue}")
        arrives_s = self._loop.time() + self._longest_s * random.random()
        when_s = self._last_s[queue] = max(self._last_s.get(queue, 0.0) + NEXT_S, arrives_s)
        self._loop.call_at(when_s, self._bring, queue, deliver, context=self._context)

    def _bring(self, queue: Hashable, deliver: Deliver) -> None:
        deliver()
        self._brought(queue)
