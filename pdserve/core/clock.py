"""Time as an argument: real code takes ``MonotonicClock``, tests and the simulator a fake one."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on one process's monotonic clock; never subtracted from another process's."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The process's own clock."""

    def now_s(self) -> float:
        return time.monotonic()
