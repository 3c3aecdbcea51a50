"""What the live page shows of the near past: the last requests, and a sample of each second.

Both are bounded rings with running numbers, so that a page that asks again gets only what is new.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

NUM_REQUESTS = 60
NUM_SAMPLES = 300
SAMPLE_PERIOD_S = 1.0

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One moment; totals are since the router's start."""

    at_s: float  # of the router's clock
    requests: int  # in work
    queued: int  # of those, at the router
    ended: int
    prompt_tokens: int
    generation_tokens: int


class Ring(Generic[Item]):
    """The last items, each with its number; numbers begin at 1."""

    def __init__(self, length: int) -> None:
        self._items: deque[tuple[int, Item]] = deque(maxlen=length)
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the newest; 0 before there is one."""
        return self._last

    def add(self, item: Item) -> None:
        self._last += 1
        self._items.append((self._last, item))

    def since(self, number: int) -> list[tuple[int, Item]]:
        """Those with higher numbers, oldest first. Of another ring's number: all."""
        if number > self._last:
            number = 0
        return list(reversed(list(_newer(reversed(self._items), number))))


def _newer(items: Iterable[tuple[int, Item]], number: int) -> Iterator[tuple[int, Item]]:
    return takewhile(lambda item: item[0] > number, items)
