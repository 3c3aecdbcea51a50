"""Which flow sends its next frame: fewest bytes left first, with ageing so that nothing starves.

A *flow* is what one handoff still has to send over one link. Short flows overtake long ones. But
each frame that passes over a link's oldest flow makes the link a creditor; once it has been passed
over often enough, and that flow has waited longer than ``patience_s``, the flow has the next frame
that its link has room for. Old flows together have every ``AGED_TURN``-th frame, so each gets done,
however many short ones keep coming, and short ones have the rest. Pure but for the clock that it is
given.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.core.clock import Clock
from pdserve.core.request import HandoffId

AGED_TURN = 4


class LinkId(NamedTuple):
    """The link to one rank of a peer."""

    peer_id: str
    rank: int


class Flow(NamedTuple):
    """One handoff over one link."""

    handoff: HandoffId
    link: LinkId


@dataclass(slots=True)
class _Waiting:
    num_bytes: int
    since_s: float


class FrameQueue:
    """Owns how many bytes of each flow wait and since when; knows no handoff's contents."""

    def __init__(self, clock: Clock, *, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._flows: dict[Flow, _Waiting] = {}
        self._passed_over: dict[LinkId, int] = {}  # frames since the link's oldest flow had one

    def add(self, flow: Flow, num_bytes: int) -> None:
        """``num_bytes`` more of this flow are waiting."""
        assert num_bytes > 0
        if (waiting := self._flows.get(flow)) is not None:
            waiting.num_bytes += num_bytes
        else:
            self._flows[flow] = _Waiting(num_bytes, self._clock.now_s())
            self._passed_over.setdefault(flow.link, 0)

    def choose(self, open_links: Container[LinkId]) -> Flow | None:
        """The flow whose frame is next, among those whose link has room; None if there is none."""
        candidates = [flow for flow in self._flows if flow.link in open_links]
        if owed := [flow for flow in self._oldest_of_links(candidates) if self._is_owed(flow)]:
            return min(owed, key=self._age_rank)
        return min(candidates, key=self._size_rank, default=None)

    def sent(self, flow: Flow, num_bytes: int) -> None:
        """A frame of the flow has left."""
        waiting = self._flows[flow]
        assert 0 < num_bytes <= waiting.num_bytes
        for oldest in self._oldest_of_links(self._flows):
            self._passed_over[oldest.link] += 1
            if oldest == flow:
                self._passed_over[oldest.link] = 0
        waiting.num_bytes -= num_bytes
        if not waiting.num_bytes:
            self._drop(flow)

    def remove(self, handoff: HandoffId) -> None:
        """Nothing more of this handoff is to be sent."""
        for flow in [flow for flow in self._flows if flow.handoff == handoff]:
            self._drop(flow)

    def _drop(self, flow: Flow) -> None:
        del self._flows[flow]
        if all(other.link != flow.link for other in self._flows):
            del self._passed_over[flow.link]

    def _oldest_of_links(self, flows: Iterable[Flow]) -> list[Flow]:
        oldest: dict[LinkId, Flow] = {}
        for flow in flows:
            best = oldest.setdefault(flow.link, flow)
            if self._age_rank(flow) < self._age_rank(best):
                oldest[flow.link] = flow
        return list(oldest.values())

    def _is_owed(self, oldest: Flow) -> bool:
        often = (AGED_TURN - 1) * len(
            self._passed_over
        )  # all links together: one frame in AGED_TURN
        waited_s = self._clock.now_s() - self._flows[oldest].since_s
        return self._passed_over[oldest.link] >= often and waited_s > self._patience_s

    def _age_rank(self, flow: Flow) -> float:
        return self._flows[flow].since_s

    def _size_rank(self, flow: Flow) -> tuple[int, float]:
        waiting = self._flows[flow]
        return waiting.num_bytes, waiting.since_s
