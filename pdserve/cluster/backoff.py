"""Pauses between the starts of what keeps ending."""

from dataclasses import dataclass

from pdserve.core.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before the next start of what keeps ending."""

    first_s: float = 0.5
    longest_s: float = 30.0
    settled_s: float = 180.0  # whatever ran for so long starts again with ``first_s``


class Delays:
    """Waiting times between starts: doubled each time, short again after a long life."""

    def __init__(self, backoff: Backoff, clock: Clock) -> None:
        self._backoff = backoff
        self._clock = clock
        self._delay_s = backoff.first_s
        self._started_s = clock.now_s()

    def started(self) -> None:
        self._started_s = self._clock.now_s()

    def next_s(self) -> float:
        """How long to wait now."""
        if self._clock.now_s() - self._started_s >= self._backoff.settled_s:
            self._delay_s = self._backoff.first_s
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._backoff.longest_s)
        return delay_s
