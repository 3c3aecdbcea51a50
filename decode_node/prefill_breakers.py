"""Which prefill nodes fail again and again, as a decode node sees them: in work, or on the link.

Pure. A node made anew starts with a clean record.
"""

from dataclasses import dataclass, field

from pdserve.core.breaker import Breaker, BreakerState, Duty, Trouble
from pdserve.core.failures import duty_blamed

_STAGES = (Duty.PREFILL, Duty.LINK)


@dataclass(slots=True)
class _Record:
    peer_id: str  # the incarnation
    breakers: dict[Duty, Breaker] = field(
        default_factory=lambda: {stage: Breaker() for stage in _STAGES}
    )


class PrefillBreakers:
    """By node name; ``meet`` comes first."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def meet(self, node: str, peer_id: str) -> None:
        """The node, or another incarnation of it, is there."""
        if node not in self._records or self._records[node].peer_id != peer_id:
            self._records[node] = _Record(peer_id)

    def allows(self, node: str, now_s: float) -> bool:
        return all(b.allows(now_s) for b in self._records[node].breakers.values())

    def sent(self, node: str, now_s: float) -> None:
        for breaker in self._records[node].breakers.values():
            breaker.sent(now_s)

    def prefilled(self, node: str) -> None:
        """First tokens came."""
        self._records[node].breakers[Duty.PREFILL].succeeded()

    def arrived(self, node: str) -> None:
        """All KV of a prefill came."""
        self._records[node].breakers[Duty.LINK].succeeded()

    def released(self, node: str) -> None:
        """A prefill there has ended in a way that says nothing of the node."""
        for breaker in self._records[node].breakers.values():
            breaker.released()

    def failed(self, node: str, kind: str, message: str, now_s: float) -> None:
        """A prefill there failed; what its request was refused for speaks against nobody."""
        blamed = duty_blamed(kind, own=Duty.PREFILL)
        for stage, breaker in self._records[node].breakers.items():
            if stage is blamed:
                breaker.failed(f"{kind}: {message}", now_s)
            else:
                breaker.released()

    def troubles(self, now_s: float) -> list[Trouble]:
        """The breakers that are not closed."""
        return [
            Trouble(node=node, stage=stage, state=state, reason=breaker.reason)
            for node, record in sorted(self._records.items())
            for stage, breaker in record.breakers.items()
            if (state := breaker.state(now_s)) is not BreakerState.CLOSED
        ]
