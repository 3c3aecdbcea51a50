"""Requests that wait at the router, and the order in which they are let in.

By priority first (lower is earlier), then fairly across tenants, then by arrival. Pure: the caller
says what time it is.

A *level* is one priority. The next one is that with the least ``priority * step_s`` + arrival of
its oldest request, so priorities age: a request is passed by one that is ``d`` priorities earlier
only if that came within ``d * step_s`` seconds after it, however many of those there are.

Within a level each tenant has a counter of the work that it was served; the one with the lowest is
next, and who comes back after a while starts where the others are (Sheng et al., "Fairness in
Serving Large Language Models", 2024; the same as start-time fair queueing). Of two tenants that
both wait all the time neither gets more work than the other by over twice the largest request.
Within a tenant, requests of one prompt class leave in the order of their arrival.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pdserve.core.errors import QueueDeadlineError

MAX_TAGS_KEPT = 64  # of tenants that do not wait, beyond as many as do


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one request needs of a decode node."""

    prompt_len: int
    max_tokens: int
    num_choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One request that waits. ``work``: tokens that it is expected to cost."""

    request_id: str
    tenant: str
    prompt_class: str
    priority: int
    demand: Demand
    work: float
    queued_s: float
    deadline_s: float

    def waited_too_long(self) -> QueueDeadlineError:
        """What its client is told after the deadline."""
        return QueueDeadlineError(
            f"no node had room for it within {self.deadline_s - self.queued_s:g} s, as "
            f"queue_timeout_s and request_timeout_s allow for class {self.prompt_class}; nothing "
            "was done for it"
        )


class WaitingQueue:
    """Adds, hands out and removes tickets; each leaves exactly once."""

    def __init__(self, *, priority_step_s: float) -> None:
        self._step_s = priority_step_s
        self._tickets: dict[str, Ticket] = {}
        self._levels: dict[int, _Level] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; of some that left already

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """By arrival."""
        return iter(self._tickets.values())

    def add(self, ticket: Ticket) -> None:
        assert ticket.request_id not in self._tickets, "a request waits once"
        self._tickets[ticket.request_id] = ticket
        self._levels.setdefault(ticket.priority, _Level()).add(ticket)
        heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.request_id))

    def first(self) -> Ticket | None:
        """The one whose turn it is."""
        return next(self.in_order(1), None)

    def in_order(self, num_tenants: int) -> Iterator[Ticket]:
        """The next of each class of the next ``num_tenants`` tenants of each level.

        The queue must not change while this is iterated.
        """
        order = sorted(self._levels, key=lambda p: p * self._step_s + self._levels[p].oldest_s)
        for priority in order:
            yield from self._levels[priority].in_order(num_tenants)

    def take(self, request_id: str) -> Ticket:
        """It is let in: it leaves, and its tenant has been served its work."""
        ticket = self._tickets[request_id]
        self._levels[ticket.priority].serve(ticket)
        self._leave(ticket)
        return ticket

    def remove(self, request_id: str) -> Ticket | None:
        """It leaves unserved; None where it does not wait."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._levels[ticket.priority].drop(ticket)
            self._leave(ticket)
        return ticket

    def next_deadline_s(self) -> float | None:
        """When the first of those that wait must have left."""
        while self._deadlines and self._deadlines[0][1] not in self._tickets:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now_s: float) -> Ticket | None:
        """One whose deadline has passed; it still waits."""
        deadline_s = self.next_deadline_s()
        if deadline_s is None or deadline_s > now_s:
            return None
        return self._tickets[self._deadlines[0][1]]

    def _leave(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id]
        if not self._levels[ticket.priority]:
            del self._levels[ticket.priority]
        if len(self._deadlines) > 2 * len(self._tickets) + MAX_TAGS_KEPT:
            self._deadlines = [(t.deadline_s, t.request_id) for t in self._tickets.values()]
            heapq.heapify(self._deadlines)


@dataclass(slots=True)
class _Flow:
    """What one tenant has waiting in a level."""

    tag: float  # work served to it, on the level's scale
    number: int  # of its coming, for the order of equal tags
    by_class: dict[str, dict[str, Ticket]] = field(default_factory=dict)

    def heads(self) -> Iterable[Ticket]:
        """The oldest of each class, by arrival."""
        heads = [next(iter(tickets.values())) for tickets in self.by_class.values()]
        return heads if len(heads) == 1 else sorted(heads, key=lambda ticket: ticket.queued_s)


class _Level:
    """The requests of one priority. Gone, with its counters, when nothing of it waits."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}  # by arrival
        self._flows: dict[str, _Flow] = {}
        self._tags: dict[str, float] = {}  # of tenants that have nothing waiting
        self._num_flows = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def oldest_s(self) -> float:
        return next(iter(self._tickets.values())).queued_s

    def add(self, ticket: Ticket) -> None:
        self._tickets[ticket.request_id] = ticket
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            lowest = min((f.tag for f in self._flows.values()), default=0.0)
            tag = max(self._tags.pop(ticket.tenant, 0.0), lowest)
            self._num_flows += 1
            flow = self._flows[ticket.tenant] = _Flow(tag=tag, number=self._num_flows)
        flow.by_class.setdefault(ticket.prompt_class, {})[ticket.request_id] = ticket

    def in_order(self, num_tenants: int) -> Iterator[Ticket]:
        flows = heapq.nsmallest(num_tenants, self._flows.values(), key=_turn)
        for flow in flows:
            yield from flow.heads()

    def serve(self, ticket: Ticket) -> None:
        self._flows[ticket.tenant].tag += ticket.work
        self.drop(ticket)

    def drop(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id]
        flow = self._flows[ticket.tenant]
        of_class = flow.by_class[ticket.prompt_class]
        del of_class[ticket.request_id]
        if of_class:
            return
        del flow.by_class[ticket.prompt_class]
        if not flow.by_class:
            del self._flows[ticket.tenant]
            self._keep_tag(ticket.tenant, flow.tag)

    def _keep_tag(self, tenant: str, tag: float) -> None:
        """Of many, those are forgotten that would be lifted most or lose least."""
        self._tags[tenant] = tag
        num_kept = len(self._flows) + MAX_TAGS_KEPT
        if len(self._tags) > 2 * num_kept:
            highest = heapq.nlargest(num_kept, self._tags.items(), key=lambda item: item[1])
            self._tags = dict(highest)


def _turn(flow: _Flow) -> tuple[float, int]:
    return flow.tag, flow.number
