"""Whether a request is let in: how many are in work, and whether it could ever fit.

Pure: the caller says what time it is. Which nodes have room is the policy's business.
"""

from collections import deque

from pdserve.core.errors import NeverFitsError, OverloadedError
from router.validation import SamplingFields

DRAIN_WINDOW = 64  # finished requests that the drain rate is taken from
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


class Admission:
    """Counts the requests in work; each admitted one is released exactly once."""

    def __init__(self, max_queued_requests: int) -> None:
        self._max_queued = max_queued_requests
        self._num_admitted = 0
        self._released_at_s: deque[float] = deque(maxlen=DRAIN_WINDOW)

    @property
    def num_admitted(self) -> int:
        return self._num_admitted

    def admit(self, num_requests: int, now_s: float) -> None:
        """Take in all of them. Raises OverloadedError, and takes in none, where they are too many.

        Raises NeverFitsError where not even an idle router would take so many.
        """
        if num_requests > self._max_queued:
            raise NeverFitsError(
                "prompt",
                f"{num_requests} prompts in one call, but at most {self._max_queued} requests "
                "are in work at once",
            )
        excess = self._num_admitted + num_requests - self._max_queued
        if excess > 0:
            raise OverloadedError(
                f"{self._num_admitted} requests are in work, at most {self._max_queued} are let in",
                retry_after_s=self._retry_after_s(excess, now_s),
            )
        self._num_admitted += num_requests

    def release(self, now_s: float) -> None:
        """One admitted request ended, however it ended."""
        assert self._num_admitted > 0, "released more requests than were admitted"
        self._num_admitted -= 1
        self._released_at_s.append(now_s)

    def _retry_after_s(self, excess: int, now_s: float) -> float:
        """How long the requests seen lately took to make so much room."""
        if not self._released_at_s:
            return MIN_RETRY_AFTER_S
        window_s = now_s - self._released_at_s[0]
        estimate_s = excess * window_s / len(self._released_at_s)
        return min(max(estimate_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def fit_max_tokens(
    fields: SamplingFields,
    *,
    prompt_len: int,
    prompt_field: str,
    default: int | None,
    max_model_len: int,
) -> int:
    """The most output tokens that the request may have: what was asked for, else ``default``, else
    what the context leaves.

    Raises NeverFitsError naming ``prompt_field``, ``max_tokens`` or ``min_tokens`` and what fits.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise NeverFitsError(
            prompt_field,
            f"it has {prompt_len} tokens; the context holds {max_model_len} tokens in all, so "
            f"{max_model_len - 1} prompt tokens fit",
        )
    asked = fields.max_tokens
    if asked is not None and asked > room:
        raise NeverFitsError(
            fields.max_tokens_field,
            f"got {asked}; the context holds {max_model_len} tokens and the prompt has "
            f"{prompt_len}, so {room} fit",
        )
    max_tokens = asked or min(default or room, room)
    if (fields.min_tokens or 0) > max_tokens:
        raise NeverFitsError(
            "min_tokens", f"got {fields.min_tokens}, but at most {max_tokens} tokens are generated"
        )
    return max_tokens
