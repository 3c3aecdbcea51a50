"""What is on its way between the parts of a test world: ordered queues, late by nature.

Things in one queue come in order, nothing is said about two queues: that is what a stream, a ring
or a KV link promises.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

Deliver = Callable[[], None]


class Post(Protocol):
    """Brings things at some time."""

    def put(self, queue: Hashable, deliver: Deliver) -> None: ...


class HeldPost:
    """Brings nothing until the test says of which queue."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Deliver]] = {}

    @property
    def waiting(self) -> list[Hashable]:
        """The queues with something in them, in an order that depends on the past alone."""
        return [name for name, queue in self._queues.items() if queue]

    def put(self, queue: Hashable, deliver: Deliver) -> None:
        self._queues.setdefault(queue, deque()).append(deliver)

    def bring(self, queue: Hashable) -> None:
        """Deliver the oldest thing of a queue."""
        self._queues[queue].popleft()()


class RunningPost:
    """Brings everything by itself, each thing after a random delay of up to ``longest_s``."""

    def __init__(self, *, longest_s: float = 0.002, seed: int = 0) -> None:
        self._longest_s = longest_s
        self._random = random.Random(seed)
        self._next_s: dict[Hashable, float] = {}
        self._brought = asyncio.Event()

    def put(self, queue: Hashable, deliver: Deliver) -> None:
        loop = asyncio.get_running_loop()
        earliest_s = max(loop.time(), self._next_s.get(queue, 0.0))
        # Timers of one instant come in any order: those of a queue are a microsecond apart.
        when_s = earliest_s + 1e-6 + self._random.random() * self._longest_s
        self._next_s[queue] = when_s
        loop.call_at(when_s, self._bring, deliver)

    async def pause(self, longest_s: float) -> None:
        """Wait until something is brought, or that long."""
        self._brought.clear()
        try:
            async with asyncio.timeout(longest_s):
                await self._brought.wait()
        except TimeoutError:
            pass  # nothing is on its way

    def _bring(self, deliver: Deliver) -> None:
        deliver()
        self._brought.set()
