"""Puts legs on nodes and takes them off: route by the policy, submit, abort, keep the loads.

Knows nodes and sessions; what a leg's outputs are worth is ``delivery.py``'s business.
"""

from dataclasses import dataclass, replace

from pdserve.core.node import Role
from pdserve.core.request import Request, RequestKey, SamplingParams
from pdserve.core.timeline import Timeline
from router.channel import Channels
from router.delivery import StartLeg
from router.head_room import HeadRoom
from router.load_book import LoadBook, Placement
from router.policy import Policy
from router.waiting import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be answered ``num_choices`` times."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int
    priority: int = 0  # lower is let in earlier

    @property
    def demand(self) -> Demand:
        return Demand(
            prompt_len=len(self.prompt_ids),
            max_tokens=self.sampling.max_tokens,
            num_choices=self.num_choices,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Leg:
    """One attempt in work on a decode node."""

    key: RequestKey
    node: str
    session: int
    placement: Placement
    explain: str
    prefilled: bool = False  # its first token came
    timeline: Timeline | None = None  # as the node told it last


class Legs:
    """Every leg that was started and not ended is counted in the loads."""

    def __init__(self, channels: Channels, policy: Policy, head_room: HeadRoom) -> None:
        self._channels = channels
        self._policy = policy
        self._head_room = head_room
        self._load_book = LoadBook()

    def any_ready(self) -> bool:
        """Whether any decode node could take a leg."""
        return any(view.ready and view.role is Role.DECODE for view in self._channels.views())

    def full_nodes(self, demand: Demand) -> frozenset[str] | None:
        """See ``HeadRoom.full_nodes``."""
        return self._head_room.full_nodes(self._channels.views(), demand)

    def start(self, request_id: str, job: Job, start: StartLeg, avoid: frozenset[str]) -> Leg:
        """Route and submit. Raises NoNodeError or NodeLostError where no decode node takes it."""
        prefill_len = len(job.prompt_ids) + len(start.output_ids)
        loads = self._load_book.loads(self._channels.views())
        decision = self._policy.choose(prefill_len, loads, avoid)
        request = Request(
            request_id=request_id,
            attempt=start.attempt,
            token_ids=job.prompt_ids + start.output_ids,
            prompt_len=len(job.prompt_ids),
            choices=start.choices,
            sampling=job.sampling,
            route=decision.route,
        )
        node, prefill_nodes = decision.route.decode_node, decision.route.prefill_nodes
        leg = Leg(
            key=request.key,
            node=node,
            session=self._channels.submit(node, request),
            placement=Placement(
                decode_node=node,
                prefill_node=prefill_nodes[0] if prefill_nodes else None,
                num_choices=len(start.choices),
                prefill_len=prefill_len,
            ),
            explain=decision.explain,
        )
        self._load_book.add(leg.placement)
        demand = replace(job.demand, prompt_len=prefill_len, num_choices=len(start.choices))
        self._head_room.place(self._channels.view(node), leg.key, demand)
        return leg

    def output_came(self, leg: Leg) -> None:
        if not leg.prefilled:
            leg.prefilled = True
            self._load_book.prefilled(leg.placement)

    def end(self, leg: Leg, *, abort: bool) -> None:
        self._load_book.remove(leg.placement)
        self._head_room.end(leg.node, leg.key)
        if abort:
            self._channels.abort(leg.node, leg.session, leg.key)

    def heard(self, node: str) -> None:
        """The node told its state."""
        self._load_book.heard(node)
        self._head_room.heard(node)
