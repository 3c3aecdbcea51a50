"""Who is let in, who waits and who is refused.

A request that is let in goes to a node; before that it waits here and has cost nothing. Three
bounds: all requests that this router has not ended yet, those of a prompt class that wait, and how
long they may wait. Pure: the caller says what time it is, and (``head_room.py``) which nodes have
room.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve.core.config import LimitsConfig, PromptClass
from pdserve.core.errors import NeverFitsError, OverloadedError
from router.drain_rate import DrainRate
from router.validation import SamplingFields
from router.waiting import Demand, Ticket, WaitingQueue

OVERTAKE_S = 2.0  # how long others may pass a request that no node has room for
NUM_OVERTAKERS = 16  # tenants of each priority that are looked at then
FIRST_OUTPUT_LEN = 128.0  # taken for an answer's length until some are known
OUTPUT_LEN_WEIGHT = 0.02  # of the newest answer in the mean


class Refusal(StrEnum):
    """Why a request was not served."""

    IN_WORK = "in_work"  # too many requests that have not ended
    CLASS_FULL = "class_full"  # too many of its prompt class wait
    QUEUE_DEADLINE = "queue_deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassQueue:
    """The queue of one prompt class as others may see it."""

    prompt_class: str
    num_waiting: int
    max_queued: int | None
    oldest_s: float  # how long its oldest request has waited


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionReport:
    """The queues of this moment, and what was refused so far."""

    queues: tuple[ClassQueue, ...]
    refused: Mapping[Refusal, int]


class Admission:
    """Every admitted request waits until it is let in or dropped, and is released exactly once."""

    def __init__(self, limits: LimitsConfig, classes: Sequence[PromptClass]) -> None:
        self._limits = limits
        self._classes = tuple(classes)
        self._queue = WaitingQueue(priority_step_s=limits.priority_step_s)
        self._num_waiting: Counter[str] = Counter()  # by class
        self._blocked_since_s: dict[str, float] = {}  # requests that found no room
        self._num_admitted = 0
        self._ended = DrainRate()
        self._let_in = {c.name: DrainRate() for c in classes}
        self._refused: Counter[Refusal] = Counter(dict.fromkeys(Refusal, 0))
        self._mean_output_len = FIRST_OUTPUT_LEN

    @property
    def num_admitted(self) -> int:
        """Requests that were not released yet."""
        return self._num_admitted

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def admit(
        self, demands: Mapping[str, Demand], *, tenant: str, priority: int, now_s: float
    ) -> None:
        """Take in a call's requests, by their ids; from now on they wait.

        Raises OverloadedError, and takes in none, where they are too many now; NeverFitsError where
        not even an idle router would take so many.
        """
        by_class = Counter(self._class_of(demand).name for demand in demands.values())
        self._check_total(len(demands), now_s)
        for prompt_class in self._classes:
            self._check_class(prompt_class, by_class[prompt_class.name], now_s)
        self._num_admitted += len(demands)
        self._num_waiting += by_class
        for request_id, demand in demands.items():
            self._queue.add(self._ticket(request_id, demand, tenant, priority, now_s))

    def candidates(self, now_s: float) -> Iterator[Ticket]:
        """Who may be let in now: the one whose turn it is and, while it has not been without room
        for OVERTAKE_S, those after it. Call again after each ``let_in``.
        """
        first = self._queue.first()
        if first is None:
            return
        yield first
        if now_s - self._blocked_since_s.get(first.request_id, now_s) > OVERTAKE_S:
            return  # what becomes free is for that one
        for ticket in self._queue.in_order(NUM_OVERTAKERS):
            if ticket is not first:
                yield ticket

    def found_no_room(self, request_id: str, now_s: float) -> None:
        """No decode node has blocks enough for it."""
        self._blocked_since_s.setdefault(request_id, now_s)

    def let_in(self, request_id: str, now_s: float) -> float:
        """It goes to a node; returns how long it waited."""
        ticket = self._queue.take(request_id)
        self._left(ticket)
        self._let_in[ticket.prompt_class].left(now_s)
        return now_s - ticket.queued_s

    def expired(self, now_s: float) -> Ticket | None:
        """One that waited too long and is still here; the caller releases it."""
        return self._queue.expired(now_s)

    def next_deadline_s(self) -> float | None:
        """When the first of those that wait will have waited too long."""
        return self._queue.next_deadline_s()

    def release(self, request_id: str, now_s: float, *, num_output_tokens: int) -> None:
        """One admitted request ended, however it ended; if it still waits, it is dropped."""
        assert self._num_admitted > 0, "released more requests than were admitted"
        self._num_admitted -= 1
        ticket = self._queue.remove(request_id)
        if ticket is not None:
            self._left(ticket)
            self._refused[Refusal.QUEUE_DEADLINE] += ticket.deadline_s <= now_s
            return
        self._ended.left(now_s)
        if num_output_tokens:
            off = num_output_tokens - self._mean_output_len
            self._mean_output_len += OUTPUT_LEN_WEIGHT * off

    def report(self, now_s: float) -> AdmissionReport:
        oldest_s: dict[str, float] = {}
        for ticket in self._queue:
            oldest_s.setdefault(ticket.prompt_class, ticket.queued_s)
        queues = tuple(
            ClassQueue(
                prompt_class=c.name,
                num_waiting=self._num_waiting[c.name],
                max_queued=c.max_queued,
                oldest_s=now_s - oldest_s.get(c.name, now_s),
            )
            for c in self._classes
        )
        return AdmissionReport(queues=queues, refused=dict(self._refused))

    def _class_of(self, demand: Demand) -> PromptClass:
        return next(c for c in self._classes if c.below is None or demand.prompt_len < c.below)

    def _check_total(self, num_requests: int, now_s: float) -> None:
        most = self._limits.max_queued_requests
        if num_requests > most:
            raise NeverFitsError(
                "prompt",
                f"{num_requests} prompts in one call, but at most {most} requests are in work at "
                "once",
            )
        excess = self._num_admitted + num_requests - most
        if excess > 0:
            self._refused[Refusal.IN_WORK] += num_requests
            raise OverloadedError(
                f"{self._num_admitted} requests are in work, at most {most} are let in",
                retry_after_s=self._ended.retry_after_s(excess, now_s),
            )

    def _check_class(self, prompt_class: PromptClass, num_requests: int, now_s: float) -> None:
        name, most = prompt_class.name, prompt_class.max_queued
        if most is None or num_requests == 0:
            return
        if num_requests > most:
            raise NeverFitsError(
                "prompt",
                f"{num_requests} prompts of class {name} in one call, but at most {most} of them "
                "may wait",
            )
        excess = self._num_waiting[name] + num_requests - most
        if excess > 0:
            self._refused[Refusal.CLASS_FULL] += num_requests
            raise OverloadedError(
                f"{self._num_waiting[name]} requests of class {name} wait, at most {most} may",
                retry_after_s=self._let_in[name].retry_after_s(excess, now_s),
            )

    def _ticket(
        self, request_id: str, demand: Demand, tenant: str, priority: int, now_s: float
    ) -> Ticket:
        prompt_class = self._class_of(demand)
        timeout_s = prompt_class.queue_timeout_s or self._limits.queue_timeout_s
        output_len = min(demand.max_tokens, self._mean_output_len)
        return Ticket(
            request_id=request_id,
            tenant=tenant,
            prompt_class=prompt_class.name,
            priority=priority,
            demand=demand,
            work=demand.prompt_len + demand.num_choices * output_len,
            queued_s=now_s,
            deadline_s=now_s + min(timeout_s, self._limits.request_timeout_s),
        )

    def _left(self, ticket: Ticket) -> None:
        self._num_waiting[ticket.prompt_class] -= 1
        self._blocked_since_s.pop(ticket.request_id, None)


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
