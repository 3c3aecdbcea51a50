"""Handoffs that are over, so that late news of them is known for what it is."""

from kv_transfer.reasons import cut
from pdserve.core.request import HandoffId

MAX_REMEMBERED = 8192  # news of an older one is that of an unknown handoff


class Settled:
    """Remembers how the last handoffs ended."""

    def __init__(self) -> None:
        self._ends: dict[HandoffId, str] = {}

    def add(self, handoff: HandoffId, end: str) -> None:
        """``end`` completes the sentence "the handoff …"; the first one counts."""
        self._ends.setdefault(handoff, cut(end))
        if len(self._ends) > MAX_REMEMBERED:
            del self._ends[next(iter(self._ends))]

    def end_of(self, handoff: HandoffId) -> str | None:
        return self._ends.get(handoff)
