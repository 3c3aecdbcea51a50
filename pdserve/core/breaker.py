"""A circuit breaker: what keeps failing is left alone for a while, then tried with one request.

    CLOSED ── FAILURES_TO_OPEN failures in a row ──> OPEN ── back-off passed ──> HALF_OPEN
       ^                                              ^                            |   |
       |                                              '── failure: back-off doubled'   |
       '── progress: closed on probation, one more failure opens again ────────────────'

Pure: time is an argument. A trial that has no end within ``TRIAL_S`` does not keep others away. Who
counts what as a failure is the owner's business; what a client did wrong never is one.
"""

from dataclasses import dataclass
from enum import StrEnum

FAILURES_TO_OPEN = 3
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
TRIAL_S = 30.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Duty(StrEnum):
    """What a node was asked for when it failed."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A breaker that is not closed, as it is shown."""

    node: str
    stage: Duty
    state: BreakerState
    reason: str  # of the last failure


class Breaker:
    """Of one stage on one incarnation of a node."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._backoff_s = FIRST_BACKOFF_S
        self._opened_until_s: float | None = None  # None: closed
        self._trial_began_s: float | None = None
        self.reason = ""  # of the last failure

    def state(self, now_s: float) -> BreakerState:
        if self._opened_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._opened_until_s else BreakerState.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        match self.state(now_s):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
        began_s = self._trial_began_s
        return began_s is None or now_s - began_s >= TRIAL_S

    def sent(self, now_s: float) -> None:
        """A request was sent; half open, it is the trial."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._trial_began_s = now_s

    def progressed(self, now_s: float) -> None:
        """Something good came, and it was not the end: a trial has shown enough."""
        if self.state(now_s) is BreakerState.HALF_OPEN:
            self._opened_until_s = self._trial_began_s = None
            self._num_failures = FAILURES_TO_OPEN - 1

    def released(self) -> None:
        """A request ended in a way that says nothing of the node: another one may be the trial."""
        self._trial_began_s = None

    def wait_s(self, now_s: float) -> float:
        """Until it is half open; 0 where it is not open."""
        return max(0.0, (self._opened_until_s or now_s) - now_s)

    def succeeded(self) -> None:
        """A request ended well."""
        self._num_failures = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._opened_until_s = self._trial_began_s = None

    def failed(self, reason: str, now_s: float) -> None:
        """What failed while open was sent before, and says nothing new."""
        self.reason = reason
        if self.state(now_s) is BreakerState.OPEN:
            return
        self._num_failures += 1
        if self._num_failures >= FAILURES_TO_OPEN:
            self._opened_until_s = now_s + self._backoff_s
            self._trial_began_s = None
            self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
