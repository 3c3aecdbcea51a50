"""The slo policy takes the way with the most head-room, for the request and for its neighbours."""

import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.cost import LinkCost, NodeCosts
from pdserve.core.routing_config import SloConfig
from router.policies.slo import SloPolicy
from router.policy import DecodeLoad, Loads, Place
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

CONFIG = RouterConfig(
    policy="slo", local_prefill_below=0, slo=SloConfig(ttft_ms=1000.0, tpot_ms=100.0)
)
POLICY = SloPolicy(CONFIG, True)
D0 = decode("d0", costs=DECODE_COSTS)


def way(nodes: Loads, num_tokens: int = 300, **fields) -> str:
    route = POLICY.choose(prompt(num_tokens, **fields), nodes).route
    return "+".join((route.decode_node, *route.prefill_nodes[:1]))


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        # Idle nodes: alone, as nobody decodes there and nothing has to be moved.
        (loads(D0, prefill=prefill(PREFILL_COSTS, p0=0)), "d0"),
        # A chunk of 256 ms would break the neighbours' 100 ms.
        (
            loads(decode("d0", 2, costs=DECODE_COSTS), prefill=prefill(PREFILL_COSTS, p0=0)),
            "d0+p0",
        ),
        # The prefill node's queue would break the first token's limit by far.
        (
            loads(decode("d0", 2, costs=DECODE_COSTS), prefill=prefill(PREFILL_COSTS, p0=5000)),
            "d0",
        ),
        # The other prefill node has the shorter queue.
        (
            loads(
                decode("d0", 2, costs=DECODE_COSTS), prefill=prefill(PREFILL_COSTS, p0=500, p1=100)
            ),
            "d0+p1",
        ),
        # A decode node with fewer neighbours leaves more between tokens.
        (
            loads(
                decode("d0", 60, costs=DECODE_COSTS),
                decode("d1", 20, costs=DECODE_COSTS),
                prefill=prefill(PREFILL_COSTS, p0=0),
            ),
            "d1+p0",
        ),
    ],
)
def test_the_way_with_the_most_head_room_is_taken(nodes: Loads, chosen: str) -> None:
    assert way(nodes) == chosen


def test_the_limits_of_a_request_go_before_the_file() -> None:
    nodes = loads(decode("d0", 2, costs=DECODE_COSTS), prefill=prefill(PREFILL_COSTS, p0=700))
    assert way(nodes) == "d0+p0"  # 1.0 s of 1 s
    assert way(nodes, ttft_limit_s=0.4, tpot_limit_s=5.0) == "d0"


def test_a_link_that_holds_up_the_second_token_is_taken_into_account() -> None:
    slow = NodeCosts(prefill=PREFILL, link=LinkCost(latency_s=0, s_per_byte=1e-3, token_bytes=100))
    nodes = loads(decode("d0", 2, costs=DECODE_COSTS), prefill=prefill(slow, p0=0))
    assert way(nodes) == "d0"


def test_where_no_way_keeps_the_limits_the_least_violation_is_taken_and_said() -> None:
    nodes = loads(D0, prefill=prefill(PREFILL_COSTS, p0=9000, p1=3000))
    decision = POLICY.choose(prompt(5000), nodes)
    assert decision.route.prefill_nodes == ()
    assert "none of 3 ways keeps the limits" in decision.explain


def test_the_alternates_of_a_pair_are_the_other_pairs_best_first() -> None:
    nodes = loads(
        decode("d0", 2, costs=DECODE_COSTS), prefill=prefill(PREFILL_COSTS, p0=90, p1=0, p2=40)
    )
    decision = POLICY.choose(prompt(300), nodes)
    assert decision.route.prefill_nodes == ("p1", "p2", "p0")
    assert decision.place is Place.PREFILL_NODE


@pytest.mark.parametrize("node", [D0, decode("d0", costs=DECODE_COSTS, prefill_chunk=0)])
def test_the_words_have_the_figures(node: DecodeLoad) -> None:
    decision = POLICY.choose(prompt(300), loads(node, prefill=prefill(PREFILL_COSTS, p0=0)))
    assert "first token in 300 ms of 1000 ms, between tokens 11 ms of 100 ms" in decision.explain
    assert "head-room, the most of" in decision.explain


def test_before_costs_are_known_load_decides() -> None:
    nodes = loads(decode("d0", 5, costs=UNKNOWN), decode("d1", 3), prefill=prefill(p0=0))
    decision = POLICY.choose(prompt(300), nodes)
    assert decision.route.decode_node == "d1"
    assert decision.explain.startswith("no way's times are known")


def test_a_way_that_is_not_known_goes_before_those_that_violate_a_limit() -> None:
    nodes = loads(D0, prefill=(*prefill(PREFILL_COSTS, p0=9000), *prefill(UNKNOWN, p1=0)))
    assert way(nodes, 5000) == "d0+p1"
    assert way(nodes, 300) == "d0"


def test_a_node_to_avoid_or_without_room_comes_last() -> None:
    nodes = loads(
        D0, decode("d1", 50, costs=DECODE_COSTS), prefill=prefill(PREFILL_COSTS, p0=0, p1=400)
    )
    decision = POLICY.choose(prompt(300), nodes, avoid=frozenset({"d0", "p0"}))
    assert decision.route.decode_node == "d1"
    full = loads(decode("d0", 0, 3, costs=DECODE_COSTS), decode("d1", 50, costs=DECODE_COSTS))
    assert way(full) == "d1"


def test_a_node_without_a_known_way_is_taken_before_one_that_failed_the_request() -> None:
    nodes = loads(D0, decode("d1", costs=DECODE_COSTS, prefill_chunk=0))
    decision = POLICY.choose(prompt(300), nodes, avoid=frozenset({"d0"}))
    assert decision.route.decode_node == "d1"
    assert decision.explain.startswith("all ways that are known go over nodes that failed it")
