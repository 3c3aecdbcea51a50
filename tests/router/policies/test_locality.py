"""Where a prompt is prefilled, by rules that every policy follows."""

from typing import Any

import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.cost import LinkCost, NodeCosts
from pdserve.core.errors import NoNodeError
from pdserve.core.routing_config import POLICY_NAMES, ConditionalConfig
from router.policy import Decision, DecodeLoad, Loads, Place, PrefillLoad, make_policy
from tests.router.policies.loads import (
    DECODE_COSTS,
    PREFILL,
    PREFILL_COSTS,
    UNKNOWN,
    decode,
    loads,
    prefill,
    prompt,
)

BUSY = prefill(PREFILL_COSTS, p0=2000)
IDLE = prefill(PREFILL_COSTS, p0=0)
SLOW_LINK = prefill(
    NodeCosts(prefill=PREFILL, link=LinkCost(latency_s=0, s_per_byte=1e-3, token_bytes=100)), p0=0
)
FREE = decode("d0", costs=DECODE_COSTS)


def choose(
    nodes: Loads,
    *,
    policy: str = "length",
    num_tokens: int = 500,
    configured: bool = True,
    **rules: Any,
) -> Decision:
    conditional = ConditionalConfig(enabled=bool(rules), **rules)
    config = RouterConfig(policy=policy, local_prefill_below=10, conditional=conditional)
    return make_policy(config, prefill_configured=configured).choose(prompt(num_tokens), nodes)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(
    ("nodes", "num_tokens", "configured", "place"),
    [
        (loads(FREE), 500, False, Place.NO_PREFILL_NODES),
        (loads(FREE, prefill=IDLE), 9, True, Place.SHORT),
        (loads(FREE), 500, True, Place.UNREACHABLE),
        (
            loads(decode("d0", prefill_nodes=frozenset(), costs=DECODE_COSTS), prefill=IDLE),
            500,
            True,
            Place.UNREACHABLE,
        ),
        (loads(decode("d0", prefill_chunk=0), prefill=IDLE), 500, True, Place.PREFILL_NODE),
    ],
)
def test_these_rules_need_no_figures(
    policy: str, nodes: Loads, num_tokens: int, configured: bool, place: Place
) -> None:
    decision = choose(nodes, policy=policy, num_tokens=num_tokens, configured=configured)
    assert decision.place is place
    assert (decision.route.prefill_nodes == ()) == place.is_local
    assert decision.route.local_allowed
    assert decision.degraded == (place is Place.UNREACHABLE)
    assert "d0" in decision.explain


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_without_a_decode_node_there_is_no_route(policy: str) -> None:
    with pytest.raises(NoNodeError, match="no decode node is ready"):
        choose(Loads(decode=(), prefill=IDLE), policy=policy)


@pytest.mark.parametrize(
    ("node", "pair", "rules", "place", "words"),
    [
        (FREE, BUSY, {}, Place.PREFILL_NODE, "p0 2000"),
        (FREE, BUSY, {"margin": 0.1}, Place.EARLIER, "500 ms from d0, 2500 ms from p0"),
        (FREE, BUSY, {"margin": 9.0}, Place.PREFILL_NODE, "500 ms from d0, 2500 ms from p0"),
        (FREE, IDLE, {"margin": 0.1}, Place.PREFILL_NODE, "500 ms from d0, 500 ms from p0"),
        (
            decode("d0", costs=DECODE_COSTS, queued_tokens=5000),
            BUSY,
            {"margin": 0.1},
            Place.PREFILL_NODE,
            "5500 ms from d0",
        ),
        (FREE, SLOW_LINK, {"margin": 0.1}, Place.LINK_SLOWER, "takes 50000 ms"),
        (FREE, BUSY, {"max_local_tokens": 499}, Place.PREFILL_NODE, "max_local_tokens 499"),
        (FREE, BUSY, {"max_step_ms": 1.0}, Place.EARLIER, "500 ms"),  # nobody decodes there
        (
            decode("d0", 1, costs=DECODE_COSTS),
            BUSY,
            {"max_step_ms": 200.0},
            Place.PREFILL_NODE,
            "steps of 257 ms, max_step_ms 200",
        ),
        (
            decode("d0", costs=DECODE_COSTS, prefill_chunk=0),
            BUSY,
            {"margin": 0.1},
            Place.PREFILL_NODE,
            "d0 takes no prompts",
        ),
        (decode("d0", costs=UNKNOWN), BUSY, {"margin": 0.1}, Place.PREFILL_NODE, "not known"),
    ],
)
@pytest.mark.parametrize("policy", ["length", "least_load", "prefix", "round_robin"])
def test_conditional_disaggregation_goes_by_what_is_predicted(
    policy: str,
    node: DecodeLoad,
    pair: tuple[PrefillLoad, ...],
    rules: dict[str, Any],
    place: Place,
    words: str,
) -> None:
    decision = choose(loads(node, prefill=pair), policy=policy, **rules)
    assert decision.place is place
    if policy == "length" or rules:
        assert words in decision.explain
