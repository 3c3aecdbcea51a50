"""Who has not been heard for too long. Pure: time is an argument.

Only time in which the listener itself ran counts: one that was stopped for a minute, and its peers
with it, first hears what has come meanwhile. Nor does time count, up to a bound, in which a peer
wanted to run and got no CPU (``starvation.py`` sees that): it is late, not dead.
"""

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

LOOK_S = 1.0  # how often to look
_LONGEST_GAP_S = 2 * LOOK_S  # between two looks; what is beyond it, the listener has slept
_QUIET_S = 2 * LOOK_S  # who says something every second is rarely quiet for so long
MOST_STARVED = 5.0  # times the limit: so long, in all, a peer may starve on top of it

Peer = TypeVar("Peer", bound=Hashable)


class Silence(Generic[Peer]):
    """``heard`` whenever a peer says anything, ``look`` about every ``LOOK_S`` seconds."""

    def __init__(self, peers: Iterable[Peer], *, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._looked_s = now_s
        self._awake_s = 0.0
        self._heard_s = dict.fromkeys(peers, 0.0)  # on the clock that stands still in sleep
        self._starved_s = dict.fromkeys(self._heard_s, 0.0)  # of them, since they were heard

    def heard(self, peer: Peer) -> None:
        self._heard_s[peer] = self._awake_s
        self._starved_s[peer] = 0.0

    @property
    def quiet(self) -> list[Peer]:
        """Those of whom it is worth to know, before the next look, whether they starve."""
        return [
            peer for peer, heard_s in self._heard_s.items() if self._awake_s - heard_s >= _QUIET_S
        ]

    def look(self, now_s: float, starved: Collection[Peer] = ()) -> list[Peer]:
        """The peers that said nothing for the limit or longer; ``starved`` since the last look."""
        step_s = min(now_s - self._looked_s, _LONGEST_GAP_S)
        self._awake_s += step_s
        self._looked_s = now_s
        for peer in starved:
            most_s = MOST_STARVED * self._limit_s
            self._starved_s[peer] = min(self._starved_s[peer] + step_s, most_s)
        return [
            peer
            for peer, heard_s in self._heard_s.items()
            if self._awake_s - heard_s - self._starved_s[peer] >= self._limit_s
        ]
