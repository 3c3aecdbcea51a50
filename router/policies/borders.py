"""The borders of the prompt classes, and how they follow the traffic.

Work is prompt tokens. From time to time the work that each class had in the prompts seen last is
compared with its share: as many nodes as it names, or one. Where some class has more than
``TOLERANCE`` times its share, every border goes half the way to where the shares would be right,
never further than ``MOST_MOVED`` times from where the cluster file put it. Between two moves as
many new prompts are seen as a look needs, so that borders follow traffic and not chance. Pure.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

from pdserve.core.config import PromptClass

WINDOW = 1024  # prompts that a look goes by
LOOK_EVERY = 256  # prompts
TOLERANCE = 1.25
MOST_MOVED = 4.0


class Borders:
    """``lane_of`` by the borders of now; ``saw`` may move them."""

    def __init__(self, classes: tuple[PromptClass, ...]) -> None:
        self._classes = classes
        self._configured = [c.below for c in classes if c.below is not None]
        self._bounds = list(self._configured)
        self._shares = [max(1, len(c.prefill_nodes)) for c in classes]
        self._seen: deque[int] = deque(maxlen=WINDOW)
        self._num_new = 0

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first length that is too long for its class, for each class but the last."""
        return tuple(self._bounds)

    def lane_of(self, prompt_len: int) -> int:
        """Which of the classes it is, the shortest first."""
        return bisect_right(self._bounds, prompt_len)

    def saw(self, prompt_len: int) -> str | None:
        """A prompt went to the prefill nodes; returns what was changed and why, if anything."""
        self._seen.append(prompt_len)
        self._num_new += 1
        if self._num_new < LOOK_EVERY or not self._bounds:
            return None
        self._num_new = 0
        excess = self._excess()
        if excess <= TOLERANCE:
            return None
        before = self.bounds
        self._move()
        if self.bounds == before:
            return None
        return (
            f"below {before} -> {self.bounds}, since a class had {excess:.2f} times its share of "
            f"the prompt tokens of the last {len(self._seen)} prompts; now {self._excess():.2f}"
        )

    def _excess(self) -> float:
        """The largest ratio of a class's work to its share of all work."""
        work = [0] * len(self._classes)
        for prompt_len in self._seen:
            work[bisect_right(self._bounds, prompt_len)] += prompt_len
        whole, shares = sum(work), sum(self._shares)
        return max(w * shares / (whole * s) for w, s in zip(work, self._shares, strict=True))

    def _move(self) -> None:
        wanted = _quantiles(sorted(self._seen), self._shares)
        least = 1
        for i, (now, target, first) in enumerate(
            zip(self._bounds, wanted, self._configured, strict=True)
        ):
            half_way = sqrt(now * target)
            bounded = min(max(half_way, first / MOST_MOVED), first * MOST_MOVED)
            self._bounds[i] = max(round(bounded), least)
            least = self._bounds[i] + 1


def _quantiles(lengths: Sequence[int], shares: Sequence[int]) -> list[int]:
    """The borders at which the classes would have their shares of all these tokens."""
    totals = list(accumulate(lengths))
    whole, parts = totals[-1], sum(shares)
    return [
        lengths[min(bisect_right(totals, whole * part / parts), len(lengths) - 1)]
        for part in list(accumulate(shares))[:-1]
    ]
