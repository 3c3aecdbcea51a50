"""Nodes take turns; only what is placed counts as a turn."""

from pdserve.core.config import RouterConfig
from router.policies.round_robin import RoundRobinPolicy
from tests.router.policies.loads import decode, loads, prefill, prompt

NODES = loads(decode("d0"), decode("d1", 99), decode("d2"), prefill=prefill(p1=9, p0=0))


def make() -> RoundRobinPolicy:
    return RoundRobinPolicy(RouterConfig(local_prefill_below=0), True)


def place(policy: RoundRobinPolicy, nodes=NODES, **options) -> tuple[str, str]:
    asked = prompt(100)
    decision = policy.choose(asked, nodes, **options)
    policy.placed(asked, decision)
    return decision.route.decode_node, decision.route.prefill_nodes[0]


def test_nodes_are_taken_in_turn_whatever_their_load() -> None:
    policy = make()
    turns = [place(policy) for _ in range(4)]
    assert turns == [("d0", "p0"), ("d1", "p1"), ("d2", "p0"), ("d0", "p1")]


def test_a_question_is_no_turn() -> None:
    policy = make()
    for _ in range(3):
        assert policy.choose(prompt(100), NODES).route.decode_node == "d0"


def test_a_node_to_avoid_loses_its_turn() -> None:
    policy = make()
    assert place(policy, avoid=frozenset({"d0", "p0"})) == ("d1", "p1")
    assert place(policy) == ("d2", "p0")


def test_turns_go_on_behind_a_node_that_left() -> None:
    policy = make()
    assert [place(policy)[0] for _ in range(2)] == ["d0", "d1"]
    without = loads(decode("d0"), decode("d2"), prefill=NODES.prefill)
    assert [place(policy, without)[0] for _ in range(2)] == ["d2", "d0"]
