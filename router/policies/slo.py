"""Policy ``slo``: the way that keeps the request's and its neighbours' limits with most head-room.

Every way is predicted, each decode node alone and with each of its prefill nodes. Its head-room is
the least share that is left of a limit: of the time to the first token, of the time until the
second one (which waits for the KV), of the time between tokens of the request and of those that
decode beside it. Where no way keeps the limits, the most head-room is the least violation.
"""

from collections.abc import Sequence
from dataclasses import replace

from pdserve.core.config import RouterConfig
from pdserve.core.request import Route
from router.policies.least import ready_decode, unfit
from router.policies.least_load import LeastLoadPolicy
from router.policies.locality import Locality, local_decision
from router.policies.prediction import Candidate, candidates
from router.policies.words import milliseconds, share
from router.policy import NOBODY, Decision, Loads, Place, Prompt

UNKNOWN = 0.0  # head-room of a way whose costs are not known: before those that violate a limit


class SloPolicy:
    """``router.slo`` gives the limits where the request does not."""

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._limits = config.slo
        self._locality = Locality(config, prefill_configured)
        self._without_costs = LeastLoadPolicy(config, prefill_configured)

    def choose(self, prompt: Prompt, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        ready_decode(loads)
        must = self._locality.must_be_local(prompt)
        ways = [way for way in candidates(prompt, loads) if must is None or way.prefill is None]
        if (problem := _why_not_by_limits(ways, loads, avoid)) is not None:
            decision = self._without_costs.choose(prompt, loads, avoid)
            return replace(decision, explain=f"{problem}; {decision.explain}")
        rooms = {way.name: self._head_room(prompt, way) for way in ways}
        ways.sort(key=lambda way: (_unfit(prompt, way, avoid), -rooms[way.name], way.name))
        best = ways[0]
        if must is None and all(way.prefill is None for way in ways):
            must = Place.UNREACHABLE, "no prefill node is ready and connected"
        why = self._words(prompt, best, rooms[best.name], len(ways))
        lane = self._locality.lane_of(prompt.num_tokens)
        name = self._locality.class_name(lane)
        if best.prefill is None:
            place, reason = must or (Place.HEAD_ROOM, "it leaves most head-room")
            return local_decision(name, best.decode, place, reason, why=why)
        return Decision(
            route=Route(
                decode_node=best.decode.name,
                prefill_nodes=_alternates(best, ways),
                local_allowed=True,
                lane=lane,
            ),
            prompt_class=name,
            place=Place.PREFILL_NODE,
            degraded=False,
            explain=f"class {name}: {why}",
        )

    def placed(self, prompt: Prompt, decision: Decision) -> None:
        """Remembers nothing."""

    def _head_room(self, prompt: Prompt, way: Candidate) -> float:
        if way.ttft_s is None or way.tpot_s is None:
            return UNKNOWN
        ttft_limit_s, tpot_limit_s = self._limits_of(prompt)
        second_s = way.ttft_s + way.tail_s + way.tpot_s
        rooms = [
            1 - way.ttft_s / ttft_limit_s,
            1 - second_s / (ttft_limit_s + tpot_limit_s),
            1 - way.tpot_s / tpot_limit_s,
        ]
        if way.neighbours_s is not None:
            rooms.append(1 - way.neighbours_s / tpot_limit_s)
        return min(rooms)

    def _limits_of(self, prompt: Prompt) -> tuple[float, float]:
        ttft_s, tpot_s = prompt.ttft_limit_s, prompt.tpot_limit_s
        return (
            self._limits.ttft_ms / 1000 if ttft_s is None else ttft_s,
            self._limits.tpot_ms / 1000 if tpot_s is None else tpot_s,
        )

    def _words(self, prompt: Prompt, way: Candidate, room: float, num_ways: int) -> str:
        ttft_limit_s, tpot_limit_s = self._limits_of(prompt)
        where = f"decode on {way.decode.name}"
        if way.prefill is not None:
            where += f", prefill on {way.prefill.name}"
        if way.ttft_s is None or way.tpot_s is None:
            return f"{where}: its times are not known, the other ways' limits are not kept"
        words = (
            f"{where}: first token in {milliseconds(way.ttft_s)} of {milliseconds(ttft_limit_s)}, "
            f"between tokens {milliseconds(way.tpot_s)} of {milliseconds(tpot_limit_s)}"
        )
        if way.neighbours_s is not None:
            words += f", of its neighbours {milliseconds(way.neighbours_s)}"
        if room < 0:
            return f"{words}; none of {num_ways} ways keeps the limits, this one fails least"
        return f"{words}; {share(room)} head-room, the most of {num_ways} ways"


def _why_not_by_limits(
    ways: Sequence[Candidate], loads: Loads, avoid: frozenset[str]
) -> str | None:
    if not any(way.is_known for way in ways):
        return "no way's times are known"
    if {way.decode.name for way in ways} <= avoid and not {n.name for n in loads.decode} <= avoid:
        return "all ways that are known go over nodes that failed it"
    return None


def _unfit(prompt: Prompt, way: Candidate, avoid: frozenset[str]) -> tuple[bool, bool, bool]:
    failed, full = unfit(prompt, way.decode, avoid)
    return failed, full, way.prefill is not None and way.prefill.name in avoid


def _alternates(best: Candidate, ways: Sequence[Candidate]) -> tuple[str, ...]:
    """The prefill nodes of the best way's decode node, best first."""
    return tuple(
        way.prefill.name
        for way in ways
        if way.prefill is not None and way.decode.name == best.decode.name
    )
