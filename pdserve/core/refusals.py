"""Refusals in the log: what strangers cause must not fill it. No I/O."""

PERIOD_S = 10.0


class Refusals:
    """The first is told at once; then one every ``PERIOD_S``, with how many were left out."""

    def __init__(self) -> None:
        self._told_s: float | None = None
        self._num_left_out = 0

    def note(self, refusal: str, now_s: float) -> str | None:
        """The line to log, if any."""
        if self._told_s is not None and now_s - self._told_s < PERIOD_S:
            self._num_left_out += 1
            return None
        left_out, self._num_left_out, self._told_s = self._num_left_out, 0, now_s
        return f"{refusal} ({left_out} more since the last one)" if left_out else refusal
