"""What is told of a route is what was done, and what was planned where that is another thing."""

import pytest

from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Stage, Timeline
from router.plan import Plan

PLAN = Plan(
    route=RouteTaken.DISAGGREGATED,
    prefill_on="prefill-0",
    explain="class long: decode on decode-0",
    ttft_s=None,
    tpot_s=None,
)


def done(route: RouteTaken, *nodes: str) -> Timeline:
    stages = tuple(Stage(name="prefill", node=node, duration_s=0.1) for node in nodes)
    return Timeline(route=route, stages=stages)


@pytest.mark.parametrize(
    ("timeline", "told"),
    [
        (None, PLAN.explain),
        (done(RouteTaken.DISAGGREGATED, "prefill-0"), PLAN.explain),
        (
            done(RouteTaken.FALLBACK, "decode-0"),
            f"planned disaggregated: {PLAN.explain}; done fallback: prefilled on decode-0",
        ),
        (
            done(RouteTaken.DISAGGREGATED, "prefill-0", "prefill-1"),
            f"planned disaggregated: {PLAN.explain}; done disaggregated: prefilled on prefill-1",
        ),
    ],
)
def test_another_way_than_the_planned_one_is_not_claimed(
    timeline: Timeline | None, told: str
) -> None:
    assert PLAN.told(timeline) == told
