"""Puts legs on nodes and takes them off: route by the policy, submit, abort, keep the loads.

Knows nodes and sessions; what a leg's outputs are worth is ``delivery.py``'s business.
"""

from dataclasses import dataclass, replace

from pdserve.core.clock import Clock
from pdserve.core.node import Role
from pdserve.core.request import Grammar, Request, RequestKey, SamplingParams
from pdserve.core.timeline import Timeline
from router.channel import Channels
from router.delivery import StartLeg
from router.head_room import HeadRoom
from router.load_book import Placement
from router.plan import Plan, plan_of
from router.policies.prediction import prefill_wait_s
from router.routing import Ask, Routing
from router.routing_metrics import RoutingMetrics
from router.waiting import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be answered ``num_choices`` times."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int
    cache_salt: bytes = b""
    ttft_slo_ms: float | None = None  # None: the cluster file's
    tpot_slo_ms: float | None = None
    priority: int = 0  # lower is let in earlier
    traceparent: str | None = None  # None: not traced
    grammar: Grammar | None = None

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
    plan: Plan
    started_s: float
    first_output_s: float | None = None
    last_output_s: float = 0.0
    num_tokens: int = 0
    timeline: Timeline | None = None  # as the node told it last


class Legs:
    """Every leg that was started and not ended is counted in the loads."""

    def __init__(
        self,
        channels: Channels,
        routing: Routing,
        head_room: HeadRoom,
        *,
        max_prefill_wait_s: float | None,
        metrics: RoutingMetrics,
        clock: Clock,
    ) -> None:
        self._max_prefill_wait_s = max_prefill_wait_s
        self._channels = channels
        self._routing = routing
        self._metrics = metrics
        self._clock = clock
        self._head_room = head_room

    def any_ready(self) -> bool:
        """Whether any decode node could take a leg."""
        return any(view.ready and view.role is Role.DECODE for view in self._channels.views())

    def full_nodes(self, demand: Demand) -> frozenset[str] | None:
        """See ``HeadRoom.full_nodes``."""
        return self._head_room.full_nodes(self._channels.views(), demand)

    def blocks_left(self) -> dict[str, int]:
        """See ``HeadRoom.blocks_left``."""
        return self._head_room.blocks_left(self._channels.views())

    def prefill_is_far(self, job: Job, start: StartLeg, avoid: frozenset[str]) -> bool:
        """Whether the prompts ahead of it would take too long, on the node that would prefill it
        now.
        """
        if self._max_prefill_wait_s is None:
            return False
        ask = _ask(job, start, job.prompt_ids + start.output_ids)
        chosen = self._routing.ask(ask, self._channels.views(), avoid).predicted
        wait_s = prefill_wait_s(chosen.prefill or chosen.decode)
        return wait_s is not None and wait_s > self._max_prefill_wait_s

    def start(self, request_id: str, job: Job, start: StartLeg, avoid: frozenset[str]) -> Leg:
        """Route and submit. Raises NoNodeError or NodeLostError where no decode node takes it."""
        token_ids = job.prompt_ids + start.output_ids
        views = self._channels.views()
        routed = self._routing.ask(_ask(job, start, token_ids), views, avoid)
        request = Request(
            request_id=request_id,
            attempt=start.attempt,
            token_ids=token_ids,
            prompt_len=len(job.prompt_ids),
            choices=start.choices,
            sampling=_sampling(job, start),
            route=routed.decision.route,
            cache_salt=job.cache_salt,
            traceparent=job.traceparent,
            grammar=job.grammar,
        )
        node = routed.decision.route.decode_node
        session = self._channels.submit(node, request)
        self._metrics.placed(routed.decision.place)
        leg = Leg(
            key=request.key,
            node=node,
            session=session,
            placement=self._routing.place(routed, views),
            plan=plan_of(routed),
            started_s=self._clock.now_s(),
        )
        demand = replace(job.demand, prompt_len=len(token_ids), num_choices=len(start.choices))
        self._head_room.place(self._channels.view(node), leg.key, demand)
        return leg

    def output_came(self, leg: Leg, num_tokens: int, now_s: float) -> None:
        """The leg gave tokens of one of its choices."""
        leg.last_output_s = now_s
        leg.num_tokens += num_tokens
        if leg.first_output_s is None:
            leg.first_output_s = now_s
            self._routing.prefilled(leg.placement)
            if leg.plan.ttft_s is not None:
                self._metrics.ttft_seen(leg.first_output_s - leg.started_s, leg.plan.ttft_s)

    def end(self, leg: Leg, *, abort: bool) -> None:
        self._routing.remove(leg.placement)
        self._compare_tpot(leg)
        self._head_room.end(leg.node, leg.key)
        if abort:
            self._channels.abort(leg.node, leg.session, leg.key)

    def end_choice(self, leg: Leg, choice: int) -> None:
        """Nobody wants more of it; the leg goes on with its others."""
        self._channels.end_choice(leg.node, leg.session, leg.key, choice)

    def heard(self, node: str) -> None:
        """The node told its state."""
        self._routing.heard(node)
        self._head_room.heard(node)

    def _compare_tpot(self, leg: Leg) -> None:
        num_steps = leg.num_tokens // leg.placement.num_choices - 1
        if leg.first_output_s is None or leg.plan.tpot_s is None or num_steps < 1:
            return
        seen_s = (leg.last_output_s - leg.first_output_s) / num_steps
        self._metrics.tpot_seen(seen_s, leg.plan.tpot_s)


def _sampling(job: Job, start: StartLeg) -> SamplingParams:
    """All log-probabilities of the prompt came before the first token: they are not asked again."""
    return replace(job.sampling, prompt_logprobs=None) if start.output_ids else job.sampling


def _ask(job: Job, start: StartLeg, token_ids: tuple[int, ...]) -> Ask:
    return Ask(
        num_tokens=len(token_ids),
        token_ids=token_ids,
        num_choices=len(start.choices),
        cache_salt=job.cache_salt,
        ttft_slo_ms=job.ttft_slo_ms,
        tpot_slo_ms=job.tpot_slo_ms,
    )
