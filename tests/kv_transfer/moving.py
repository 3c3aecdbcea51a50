"""A handoff as a test knows it that moves many at once: who may use its blocks, who ended it."""

from dataclasses import dataclass, field

from pdserve.core.kv_layout import BlockId


@dataclass(slots=True)
class Side:
    """One handoff at one node: which ranks may still use its blocks, which have ended it."""

    blocks: tuple[BlockId, ...]
    users: set[int]
    is_cancelled: bool = False
    ended: set[int] = field(default_factory=set)  # sent, received or failed


@dataclass(slots=True)
class Moving:
    """One handoff, its ways out and in, and the value that its KV is filled with."""

    value: float
    start: int  # the receiver has what is before
    num_tokens: int
    out: Side
    num_pushed: int = 0
    into: Side | None = None

    @property
    def has_pushed(self) -> bool:
        return self.num_pushed > self.start
