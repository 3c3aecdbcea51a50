"""Predicted times, reckoned by hand: 1 ms a prompt token, 10 ms a step, 1 ms a sequence in it."""

import pytest

from pdserve.core.cost import LinkCost, NodeCosts
from router.policies.prediction import candidates, predict
from router.policy import PrefillLoad
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


def test_an_idle_decode_node_needs_the_prompt_and_no_more() -> None:
    seen = predict(prompt(500), decode("d0", costs=DECODE_COSTS), None)
    assert seen.ttft_s == pytest.approx(0.5)
    assert seen.tpot_s == pytest.approx(0.011)
    assert seen.neighbours_s is None  # there are none


def test_neighbours_slow_each_local_step_and_get_its_length() -> None:
    node = decode("d0", 10, costs=DECODE_COSTS, queued_tokens=100)
    seen = predict(prompt(500), node, None)
    assert seen.ttft_s == pytest.approx(0.1 + 0.5 + 3 * 0.010)  # 3 steps of 256 tokens
    assert seen.tpot_s == pytest.approx(0.021)
    assert seen.neighbours_s == pytest.approx(0.256 + 0.010)


def test_a_prefill_node_first_computes_what_waits_there() -> None:
    (node,) = prefill(PREFILL_COSTS, p0=1000)
    seen = predict(prompt(500), decode("d0", 10, costs=DECODE_COSTS), node)
    assert seen.ttft_s == pytest.approx(1.5)
    assert seen.tpot_s == seen.neighbours_s == pytest.approx(0.021)
    assert seen.transfer_s == pytest.approx(0.05)


@pytest.mark.parametrize(("queued_there", "step_s"), [(1000, 0.021), (100, 0.021 + 0.256)])
def test_prompts_that_the_decode_node_computes_when_the_request_comes_slow_its_steps(
    queued_there: int, step_s: float
) -> None:
    (node,) = prefill(PREFILL_COSTS, p0=queued_there)
    busy = decode("d0", 10, costs=DECODE_COSTS, queued_tokens=900)  # for 0.9 s
    assert predict(prompt(500), busy, node).tpot_s == pytest.approx(step_s)


def test_what_is_cached_is_neither_computed_nor_moved() -> None:
    (node,) = prefill(PREFILL_COSTS, p0=0)
    asked = prompt(500, cached={"p0": 400, "d0": 300})
    d0 = decode("d0", costs=DECODE_COSTS)
    pair, local = predict(asked, d0, node), predict(asked, d0, None)
    assert pair.ttft_s == pytest.approx(0.1)
    assert pair.transfer_s == pytest.approx(0.02)
    assert local.ttft_s == pytest.approx(0.2)


def test_of_a_fast_link_only_the_last_chunk_is_left_at_the_first_token() -> None:
    (node,) = prefill(PREFILL_COSTS, p0=0)
    seen = predict(prompt(1024), decode("d0", costs=DECODE_COSTS), node)
    assert seen.tail_s == pytest.approx(0.0512)  # 512 of 1024 tokens


def test_a_slow_link_goes_on_after_the_first_token() -> None:
    link = LinkCost(latency_s=0.0, s_per_byte=1e-4, token_bytes=100)
    (node,) = prefill(NodeCosts(prefill=PREFILL, link=link), p0=0)
    seen = predict(prompt(1024), decode("d0", costs=DECODE_COSTS), node)
    assert seen.transfer_s == pytest.approx(10.24)
    assert seen.tail_s == pytest.approx(10.24 - 1.024)


@pytest.mark.parametrize(
    ("node", "pair"),
    [
        (decode("d0", costs=UNKNOWN), prefill(PREFILL_COSTS, p0=0)),
        (decode("d0", costs=DECODE_COSTS), prefill(UNKNOWN, p0=0)),
    ],
)
def test_what_was_not_measured_is_not_predicted(node, pair: tuple[PrefillLoad, ...]) -> None:
    assert not predict(prompt(10), node, pair[0]).is_known
    assert predict(prompt(10), node, None).is_known == (node.costs == DECODE_COSTS)


def test_the_open_ways_are_nodes_that_take_prompts_and_connected_pairs() -> None:
    nodes = loads(
        decode("d0", prefill_nodes=frozenset({"p1"})),
        decode("d1", prefill_chunk=0),
        prefill=prefill(p0=0, p1=0),
    )
    names = [way.name for way in candidates(prompt(10), nodes)]
    assert names == ["d0", "d0+p1", "d1+p0", "d1+p1"]
