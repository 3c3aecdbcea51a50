"""Least load compares times where they are known, else counts."""

import pytest

from pdserve.core.config import RouterConfig
from router.policies.least_load import LeastLoadPolicy
from router.policy import Decision, DecodeLoad, PrefillLoad
from tests.router.policies.loads import (
    DECODE_COSTS,
    PREFILL_COSTS,
    UNKNOWN,
    decode,
    loads,
    prefill,
    prompt,
)

POLICY = LeastLoadPolicy(RouterConfig(local_prefill_below=0), True)


def choose(*nodes: DecodeLoad, prefill: tuple[PrefillLoad, ...] = ()) -> Decision:
    return POLICY.choose(prompt(100), loads(*nodes, prefill=prefill))


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([decode("d0", 3, costs=DECODE_COSTS), decode("d1", 2, costs=DECODE_COSTS)], "d1"),
        (  # prompts that d1 has to compute itself weigh more than one request
            [
                decode("d0", 3, costs=DECODE_COSTS),
                decode("d1", 2, queued_tokens=500, costs=DECODE_COSTS),
            ],
            "d0",
        ),
        ([decode("d0", 3, costs=UNKNOWN), decode("d1", 9, costs=DECODE_COSTS)], "d0"),
        ([decode("d0", 3, costs=DECODE_COSTS), decode("d1", 3, costs=DECODE_COSTS)], "d0"),
        ([decode("d0", 0, 3, costs=DECODE_COSTS), decode("d1", 9, costs=DECODE_COSTS)], "d1"),
    ],
)
def test_the_decode_node_with_the_least_wait_is_chosen(
    nodes: list[DecodeLoad], chosen: str
) -> None:
    assert choose(*nodes).route.decode_node == chosen


def test_prefill_nodes_are_ordered_by_wait_not_by_tokens() -> None:
    slow = prefill(PREFILL_COSTS, p0=100)
    fast = prefill(DECODE_COSTS, p1=150)
    decision = choose(decode("d0", costs=DECODE_COSTS), prefill=(*slow, *fast))
    assert decision.route.prefill_nodes == ("p0", "p1")
    assert "p0 100 ms, p1 150 ms" in decision.explain


def test_while_one_node_has_told_no_costs_tokens_are_compared() -> None:
    nodes = (*prefill(PREFILL_COSTS, p0=100), *prefill(UNKNOWN, p1=50))
    decision = choose(decode("d0", costs=DECODE_COSTS), prefill=nodes)
    assert decision.route.prefill_nodes == ("p1", "p0")
    assert "p1 50, p0 100" in decision.explain
