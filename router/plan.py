"""What was decided for a leg, and how it is told beside what was done.

A decode node goes on by the route when something fails, so the way that was planned is not always
the way that was taken: a timeline says both.
"""

from dataclasses import dataclass

from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Timeline
from router.routing import Routed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``prefill_on`` is the node that was to prefill. Times are predictions; None: not known."""

    route: RouteTaken
    prefill_on: str
    explain: str
    ttft_s: float | None
    tpot_s: float | None

    def told(self, done: Timeline | None) -> str:
        """Why it was sent as it was and, where that was not what was done, what was."""
        if done is None:
            return self.explain
        nodes = [stage.node for stage in done.stages if stage.name == "prefill"]
        node = nodes[-1] if nodes else self.prefill_on
        if (done.route, node) == (self.route, self.prefill_on):
            return self.explain
        return f"planned {self.route}: {self.explain}; done {done.route}: prefilled on {node}"


def plan_of(routed: Routed) -> Plan:
    decision = routed.decision
    return Plan(
        route=routed.planned,
        prefill_on=(*decision.route.prefill_nodes, decision.route.decode_node)[0],
        explain=decision.explain,
        ttft_s=routed.predicted.ttft_s,
        tpot_s=routed.predicted.tpot_s,
    )
