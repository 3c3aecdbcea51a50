"""Costs cross as they are, unknown ones as unknown."""

import pytest

from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost
from pdserve.rpc.convert import costs_from_proto, costs_to_proto

PREFILL = PrefillCost(a=0.1, b=0.0, c=1e-9)
DECODE = DecodeCost(a=0.0, b=0.2, c=0.0)
LINK = LinkCost(latency_s=0.0, s_per_byte=1e-9, token_bytes=12345)


@pytest.mark.parametrize(
    "costs",
    [
        NodeCosts(),
        NodeCosts(prefill=PREFILL),
        NodeCosts(decode=DECODE),
        NodeCosts(link=LINK),
        NodeCosts(prefill=PREFILL, decode=DECODE, link=LINK),
        NodeCosts(prefill=PrefillCost(a=0.0, b=0.0, c=0.0)),  # known to be nothing
    ],
)
def test_costs_come_back_as_they_went(costs: NodeCosts) -> None:
    assert costs_from_proto(costs_to_proto(costs)) == costs
