"""Prompts go where their beginning was sent, as long as little else waits there."""

import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.routing_config import PrefixConfig
from router.policies.prefix import PrefixPolicy
from tests.router.policies.loads import UNKNOWN, decode, loads, prefill, prompt

CONFIG = RouterConfig(local_prefill_below=0, prefix=PrefixConfig(load_gap=4))
POLICY = PrefixPolicy(CONFIG, True)


@pytest.mark.parametrize(
    ("cached", "requests", "chosen", "words"),
    [
        ({}, (3, 2), "d1", "no node was sent its beginning"),
        ({"d0": 64}, (3, 2), "d0", "64 of 100 tokens were sent to d0"),
        ({"d0": 64, "d1": 32}, (3, 2), "d0", "64 of 100"),
        ({"d0": 64, "d1": 64}, (3, 2), "d1", "64 of 100 tokens were sent to d1"),
        ({"d0": 64}, (6, 2), "d0", "64 of 100"),
        ({"d0": 64}, (7, 2), "d1", "but it has 5 requests more, load_gap 4"),
        ({"d9": 64}, (3, 2), "d1", "no node was sent its beginning"),
    ],
)
def test_the_longest_beginning_wins_unless_the_load_is_much_higher(
    cached: dict[str, int], requests: tuple[int, int], chosen: str, words: str
) -> None:
    nodes = loads(decode("d0", requests[0]), decode("d1", requests[1]))
    decision = POLICY.choose(prompt(100, cached=cached), nodes)
    assert decision.route.decode_node == chosen
    assert words in decision.explain


@pytest.mark.parametrize(
    ("queued", "order"),
    [
        ({"p0": 0, "p1": 0}, ("p1", "p0")),
        ({"p0": 0, "p1": 63}, ("p1", "p0")),
        ({"p0": 0, "p1": 65}, ("p0", "p1")),
    ],
)
def test_a_prefill_node_with_the_beginning_may_have_so_many_tokens_more_queued(
    queued: dict[str, int], order: tuple[str, ...]
) -> None:
    nodes = loads(decode("d0"), prefill=prefill(UNKNOWN, **queued))
    decision = POLICY.choose(prompt(100, cached={"p1": 64}), nodes)
    assert decision.route.prefill_nodes == order


def test_a_node_that_failed_is_not_chosen_for_its_prefix() -> None:
    nodes = loads(decode("d0"), decode("d1"), prefill=prefill(p0=0, p1=0))
    asked = prompt(100, cached={"d0": 64, "p0": 64})
    decision = POLICY.choose(asked, nodes, avoid=frozenset({"d0", "p0"}))
    assert decision.route.decode_node == "d1"
    assert decision.route.prefill_nodes == ("p1", "p0")
