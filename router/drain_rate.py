"""How fast something drains, from when the last of it left. Pure."""

from collections import deque

WINDOW = 64  # departures that the rate is taken from
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


class DrainRate:
    """``left`` for each departure; ``retry_after_s`` for who finds no place."""

    def __init__(self) -> None:
        self._left_at_s: deque[float] = deque(maxlen=WINDOW)

    def left(self, now_s: float) -> None:
        self._left_at_s.append(now_s)

    def retry_after_s(self, num_places: int, now_s: float) -> float:
        """How long the departures seen lately took to make so much room, within bounds."""
        if not self._left_at_s:
            return MIN_RETRY_AFTER_S
        window_s = now_s - self._left_at_s[0]
        estimate_s = num_places * window_s / len(self._left_at_s)
        return min(max(estimate_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
