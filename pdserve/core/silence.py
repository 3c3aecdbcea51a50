"""Who has not been heard for too long. Pure: time is an argument.

Only time in which the listener itself ran counts: one that was stopped for a minute, and its peers
with it, first hears what has come meanwhile.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

LOOK_S = 1.0  # how often to look
_LONGEST_GAP_S = 2 * LOOK_S  # between two looks; what is beyond it, the listener has slept

Peer = TypeVar("Peer", bound=Hashable)


class Silence(Generic[Peer]):
    """``heard`` whenever a peer says anything, ``look`` about every ``LOOK_S`` seconds."""

    def __init__(self, peers: Iterable[Peer], *, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._looked_s = now_s
        self._awake_s = 0.0
        self._heard_s = dict.fromkeys(peers, 0.0)  # on the clock that stands still in sleep

    def heard(self, peer: Peer) -> None:
        self._heard_s[peer] = self._awake_s

    def look(self, now_s: float) -> list[Peer]:
        """The peers that said nothing for the limit or longer."""
        self._awake_s += min(now_s - self._looked_s, _LONGEST_GAP_S)
        self._looked_s = now_s
        return [
            peer
            for peer, heard_s in self._heard_s.items()
            if self._awake_s - heard_s >= self._limit_s
        ]
