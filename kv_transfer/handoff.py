"""One handoff, on either side, without I/O: what may be sent, when blocks are free, what failed.

The sender's side; the prefill node owns its blocks until Free, which comes exactly once:

    SENDING --all ranks Sent------------------------> DONE      Free
       |
       `--Abort / RankFailed / PeerGone--> DRAINING             Cancel (and Report, if it failed)
                                              `--all ranks Drained--> DONE   Free

The receiver's side; blocks may be reused after Drained, or read after Ready:

    RECEIVING --all ranks Received------------------> READY     Ready
       |
       `--Abort / RankFailed / PeerGone--> DRAINING             Cancel (and Report, if it failed)
                                              `--all ranks Drained--> DONE   Drained

A rank answers Cancel with Drained in every case, also when it had finished or failed before. Late
or doubled news of a settled handoff means nothing.
"""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensComputed:
    """KV of positions [0, num_tokens) is computed; ``last``: that is the whole prompt."""

    num_tokens: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSent:
    """Everything of this rank was delivered."""

    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReceived:
    """Everything that this rank needs is in its blocks."""

    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """This rank can not finish the handoff."""

    rank: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrained:
    """This rank touches no block of the handoff any more."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The handoff is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """The other node is lost."""

    reason: str


SenderEvent = TokensComputed | RankSent | RankFailed | RankDrained | Abort | PeerGone
ReceiverEvent = RankReceived | RankFailed | RankDrained | Abort | PeerGone


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Send KV of positions [start, stop). Empty only if ``last``: all of it was pushed before."""

    start: int
    stop: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Tell all ranks to stop and to drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The handoff failed, not by Abort."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """No rank reads the blocks any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """All KV is in the blocks of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """No rank writes the blocks any more."""


SenderAction = Push | Cancel | Report | Free
ReceiverAction = Ready | Cancel | Report | Drained


class _State(Enum):
    MOVING = auto()
    DRAINING = auto()
    SETTLED = auto()


class SenderHandoff:
    """The prefill node's side.

    ``unit``: pushes but the last end on its multiples. ``start``, one of them: the first position
    that the receiver wants; it has what is before.
    """

    def __init__(self, *, num_ranks: int, unit: int, start: int) -> None:
        assert start % unit == 0
        self._state = _State.MOVING
        self._unit = unit
        self._num_pushed = start
        self._is_complete = False
        self._moving = set(range(num_ranks))
        self._draining = set(range(num_ranks))

    def on(self, event: SenderEvent) -> list[SenderAction]:
        match self._state, event:
            case _State.MOVING, TokensComputed(num_tokens=num_tokens, last=last):
                return self._push(num_tokens, last)
            case _State.MOVING, RankSent(rank=rank):
                assert self._is_complete, "a rank can not have sent what was not pushed"
                self._moving.discard(rank)
                return self._settle_if(not self._moving)
            case _State.MOVING, Abort():
                return self._drain()
            case _State.MOVING, RankFailed(kind=kind, message=message):
                return [*self._drain(), Report(kind=kind, message=message)]
            case _State.MOVING, PeerGone(reason=reason):
                return [*self._drain(), Report(kind="link_down_error", message=reason)]
            case _State.DRAINING, RankDrained(rank=rank):
                self._draining.discard(rank)
                return self._settle_if(not self._draining)
        return []

    def _push(self, num_tokens: int, last: bool) -> list[SenderAction]:
        start, stop = self._num_pushed, num_tokens
        assert not self._is_complete, "the whole prompt was computed before"
        if not last:
            stop -= stop % self._unit
            if stop <= start:
                return []  # the receiver has it, or it is no whole unit
        assert stop >= start, "tokens are computed in order"
        self._num_pushed = stop
        self._is_complete = last
        return [Push(start=start, stop=stop, last=last)]

    def _drain(self) -> list[SenderAction]:
        self._state = _State.DRAINING
        return [Cancel()]

    def _settle_if(self, done: bool) -> list[SenderAction]:
        if not done:
            return []
        self._state = _State.SETTLED
        return [Free()]


class ReceiverHandoff:
    """The decode node's side."""

    def __init__(self, *, num_ranks: int) -> None:
        self._state = _State.MOVING
        self._moving = set(range(num_ranks))
        self._draining = set(range(num_ranks))

    def on(self, event: ReceiverEvent) -> list[ReceiverAction]:
        match self._state, event:
            case _State.MOVING, RankReceived(rank=rank):
                self._moving.discard(rank)
                if self._moving:
                    return []
                self._state = _State.SETTLED
                return [Ready()]
            case _State.MOVING, Abort():
                return self._drain()
            case _State.MOVING, RankFailed(kind=kind, message=message):
                return [*self._drain(), Report(kind=kind, message=message)]
            case _State.MOVING, PeerGone(reason=reason):
                return [*self._drain(), Report(kind="link_down_error", message=reason)]
            case _State.DRAINING, RankDrained(rank=rank):
                self._draining.discard(rank)
                if self._draining:
                    return []
                self._state = _State.SETTLED
                return [Drained()]
        return []

    def _drain(self) -> list[ReceiverAction]:
        self._state = _State.DRAINING
        return [Cancel()]
