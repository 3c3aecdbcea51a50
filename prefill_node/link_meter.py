"""How fast KV leaves a prefill node, learned from handoffs that had the links to themselves.

Such a handoff gives two readings: the whole of it since its first push, and its last push. A chunk
is pushed when it is computed, so the first may hold time in which nothing was there to send, the
second bytes of earlier pushes; both can only be too slow, and the faster one is kept. Pure: the
owner says when things happened.
"""

from dataclasses import dataclass

from pdserve.core.cost import LinkCost
from pdserve.core.cost_fit import CostFit
from pdserve.core.request import HandoffId

FIT_EVERY = 4  # readings


@dataclass(slots=True)
class _Sending:
    began_s: float
    num_tokens: int = 0
    last_push_s: float = 0.0
    last_push_tokens: int = 0
    is_whole: bool = False
    is_alone: bool = True
    num_bytes: int = 0
    num_ranks: int = 0


class LinkMeter:
    """``token_bytes``: KV of one token on all ranks together."""

    def __init__(self, *, token_bytes: int, num_ranks: int) -> None:
        self._token_bytes = token_bytes
        self._num_ranks = num_ranks
        self._sending: dict[HandoffId, _Sending] = {}
        self._fit = CostFit()
        self._num_unfitted = 0
        self._cost: LinkCost | None = None

    def pushed(self, handoff: HandoffId, num_tokens: int, now_s: float, *, last: bool) -> None:
        """KV of the handoff's next tokens may be sent from now on."""
        sending = self._sending.setdefault(handoff, _Sending(began_s=now_s))
        sending.num_tokens += num_tokens
        sending.last_push_s, sending.last_push_tokens = now_s, num_tokens
        sending.is_whole = last
        if len(self._sending) > 1:
            for other in self._sending.values():
                other.is_alone = False

    def sent(self, handoff: HandoffId, num_bytes: int, now_s: float) -> None:
        """A rank has delivered its whole share."""
        if (sending := self._sending.get(handoff)) is None:
            return
        sending.num_bytes += num_bytes
        sending.num_ranks += 1
        if sending.num_ranks < self._num_ranks:
            return
        del self._sending[handoff]
        if sending.is_alone and sending.is_whole and sending.num_bytes:
            self._observe(sending, now_s)

    def ended(self, handoff: HandoffId) -> None:
        """The handoff is over, delivered or not."""
        self._sending.pop(handoff, None)

    def cost(self) -> LinkCost | None:
        """None before the first reading."""
        if self._num_unfitted >= FIT_EVERY or (self._num_unfitted and self._cost is None):
            self._num_unfitted = 0
            if (found := self._fit.coefficients()) is not None:
                latency_s, s_per_byte, _ = found
                self._cost = LinkCost(
                    latency_s=latency_s, s_per_byte=s_per_byte, token_bytes=self._token_bytes
                )
        return self._cost

    def _observe(self, sending: _Sending, now_s: float) -> None:
        last_bytes = sending.num_bytes * sending.last_push_tokens / max(sending.num_tokens, 1)
        readings = [(now_s - sending.began_s, float(sending.num_bytes))]
        if last_bytes:
            readings.append((now_s - sending.last_push_s, last_bytes))
        seconds, num_bytes = min(readings, key=lambda reading: reading[0] / reading[1])
        self._fit.observe(seconds, num_bytes, 0)
        self._num_unfitted += 1
