"""The length policy as a table."""

import logging

import pytest

from pdserve.core.config import PromptClass, RouterConfig
from router.policies.length import LengthPolicy
from router.policy import DecodeLoad, Place
from tests.router.policies.loads import CONFIG, decode, loads, prefill, prompt

NODES = loads(decode("d0"), prefill=prefill(p0=50, p1=20, p2=0))
POLICY = LengthPolicy(CONFIG, True)


@pytest.mark.parametrize(
    ("prompt_len", "prompt_class", "lane", "alternates"),
    [
        (1, "short", 0, ()),
        (9, "short", 0, ()),
        (10, "short", 0, ("p1", "p0")),
        (99, "short", 0, ("p1", "p0")),
        (100, "medium", 1, ("p2", "p1", "p0")),
        (999, "medium", 1, ("p2", "p1", "p0")),
        (1000, "long", 2, ("p2",)),
        (10**6, "long", 2, ("p2",)),
    ],
)
def test_length_picks_the_class_and_load_orders_the_alternates(
    prompt_len: int, prompt_class: str, lane: int, alternates: tuple[str, ...]
) -> None:
    decision = POLICY.choose(prompt(prompt_len), NODES)
    assert decision.prompt_class == prompt_class
    assert decision.route.prefill_nodes == alternates
    assert decision.route.lane == lane
    assert decision.route.local_allowed
    assert not decision.degraded
    assert prompt_class in decision.explain


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ((decode("d0", 3), decode("d1", 2)), "d1"),
        ((decode("d0", 2, 500), decode("d1", 2, 600)), "d1"),
        ((decode("d0", 2, 500), decode("d1", 2, 500)), "d0"),
        ((decode("d0", 0, 3), decode("d1", 9, 600)), "d1"),  # d0 has no room for the prompt now
        ((decode("d0", 1, 3), decode("d1", 2, 3)), "d0"),  # nobody has room
    ],
)
def test_the_least_loaded_decode_node_with_room_is_chosen(
    nodes: tuple[DecodeLoad, ...], chosen: str
) -> None:
    decision = POLICY.choose(prompt(200), loads(*nodes, prefill=NODES.prefill))
    assert decision.route.decode_node == chosen


def test_a_node_that_failed_the_request_comes_last() -> None:
    nodes = loads(decode("d0", 0), decode("d1", 50), prefill=NODES.prefill)
    decision = POLICY.choose(prompt(50), nodes, avoid=frozenset({"d0", "p1"}))
    assert decision.route.decode_node == "d1"
    assert decision.route.prefill_nodes == ("p0", "p1")


def test_only_prefill_nodes_that_the_decode_node_reaches_are_alternates() -> None:
    nodes = loads(decode("d0", prefill_nodes=frozenset({"p0"})), prefill=NODES.prefill)
    assert POLICY.choose(prompt(500), nodes).route.prefill_nodes == ("p0",)


def test_another_class_of_nodes_serves_when_the_own_is_gone() -> None:
    decision = POLICY.choose(prompt(5000), loads(decode("d0"), prefill=prefill(p0=5, p1=3)))
    assert decision.route.prefill_nodes == ("p1", "p0")
    assert decision.degraded
    assert "p2" in decision.explain


def test_borders_stand_still_unless_they_are_to_follow_the_traffic() -> None:
    policy = LengthPolicy(CONFIG, True)
    for i in range(600):
        asked = prompt(10 + i % 80)
        policy.placed(asked, policy.choose(asked, NODES))
    assert policy.choose(prompt(99), NODES).prompt_class == "short"


def test_borders_that_follow_the_traffic_say_so_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    classes = (PromptClass(name="short", below=1000), PromptClass(name="long"))
    config = RouterConfig(classes=classes, local_prefill_below=0, rebalance_classes=True)
    policy = LengthPolicy(config, True)
    with caplog.at_level(logging.INFO):
        for i in range(256):
            asked = prompt(300 + i)
            policy.placed(asked, policy.choose(asked, NODES))
    moved = policy.choose(prompt(900), NODES)
    assert (moved.prompt_class, moved.route.lane) == ("long", 1)
    (line,) = caplog.messages
    assert line.startswith("router.classes rebalanced: below (1000,) -> (")


def test_prompts_that_no_prefill_node_computes_do_not_move_borders() -> None:
    config = RouterConfig(local_prefill_below=10**6, rebalance_classes=True)
    policy = LengthPolicy(config, True)
    for _ in range(2000):
        asked = prompt(50)
        decision = policy.choose(asked, NODES)
        assert decision.place is Place.SHORT
        policy.placed(asked, decision)
    assert policy.choose(prompt(127), NODES).prompt_class == "short"
