"""The length policy as a table, and the plug-in table of policies."""

import pytest

from pdserve.core.config import PromptClass, RouterConfig
from pdserve.core.errors import ConfigError, NoNodeError
from router.policy import DecodeLoad, LengthPolicy, Loads, PrefillLoad, make_policy

CLASSES = (
    PromptClass(name="short", below=100, prefill_nodes=("p0", "p1")),
    PromptClass(name="medium", below=1000),
    PromptClass(name="long", prefill_nodes=("p2",)),
)
CONFIG = RouterConfig(classes=CLASSES, local_prefill_below=10)
ALL = frozenset({"p0", "p1", "p2"})


def decode(
    name: str, num_requests: int = 0, free_blocks: int = 1000, prefill: frozenset[str] = ALL
) -> DecodeLoad:
    return DecodeLoad(
        name=name,
        num_requests=num_requests,
        free_blocks=free_blocks,
        block_size=16,
        prefill_nodes=prefill,
    )


def prefill(**queued_tokens: int) -> tuple[PrefillLoad, ...]:
    return tuple(PrefillLoad(name=n, queued_tokens=queued) for n, queued in queued_tokens.items())


LOADS = Loads(decode=(decode("d0"),), prefill=prefill(p0=50, p1=20, p2=0))
POLICY = LengthPolicy(CONFIG, True)


@pytest.mark.parametrize(
    ("prompt_len", "prompt_class", "alternates"),
    [
        (1, "short", ()),
        (9, "short", ()),
        (10, "short", ("p1", "p0")),
        (99, "short", ("p1", "p0")),
        (100, "medium", ("p2", "p1", "p0")),
        (999, "medium", ("p2", "p1", "p0")),
        (1000, "long", ("p2",)),
        (10**6, "long", ("p2",)),
    ],
)
def test_length_picks_the_class_and_load_orders_the_alternates(
    prompt_len: int, prompt_class: str, alternates: tuple[str, ...]
) -> None:
    decision = POLICY.choose(prompt_len, LOADS)
    assert decision.prompt_class == prompt_class
    assert decision.route.prefill_nodes == alternates
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
    loads = Loads(decode=nodes, prefill=LOADS.prefill)
    assert POLICY.choose(200, loads).route.decode_node == chosen


def test_a_node_that_failed_the_request_comes_last() -> None:
    loads = Loads(decode=(decode("d0", 0), decode("d1", 50)), prefill=LOADS.prefill)
    decision = POLICY.choose(50, loads, avoid=frozenset({"d0", "p1"}))
    assert decision.route.decode_node == "d1"
    assert decision.route.prefill_nodes == ("p0", "p1")


def test_a_node_that_failed_is_better_than_none() -> None:
    assert POLICY.choose(50, LOADS, avoid=frozenset({"d0"})).route.decode_node == "d0"


def test_only_prefill_nodes_that_the_decode_node_reaches_are_alternates() -> None:
    loads = Loads(decode=(decode("d0", prefill=frozenset({"p0"})),), prefill=LOADS.prefill)
    assert POLICY.choose(500, loads).route.prefill_nodes == ("p0",)


@pytest.mark.parametrize(
    "loads",
    [
        Loads(decode=(decode("d0"),), prefill=()),
        Loads(decode=(decode("d0", prefill=frozenset()),), prefill=LOADS.prefill),
    ],
)
def test_without_a_prefill_node_the_route_is_local_and_degraded(loads: Loads) -> None:
    decision = POLICY.choose(500, loads)
    assert decision.route.prefill_nodes == ()
    assert decision.route.local_allowed
    assert decision.degraded


def test_another_class_of_nodes_serves_when_the_own_is_gone() -> None:
    loads = Loads(decode=(decode("d0"),), prefill=prefill(p0=5, p1=3))
    decision = POLICY.choose(5000, loads)
    assert decision.route.prefill_nodes == ("p1", "p0")
    assert decision.degraded
    assert "p2" in decision.explain


def test_a_cluster_without_prefill_nodes_is_not_degraded() -> None:
    decision = LengthPolicy(CONFIG, False).choose(5000, Loads(decode=(decode("d0"),), prefill=()))
    assert decision.route.prefill_nodes == ()
    assert not decision.degraded


def test_without_a_decode_node_there_is_no_route() -> None:
    with pytest.raises(NoNodeError, match="no decode node is ready"):
        POLICY.choose(5, Loads(decode=(), prefill=LOADS.prefill))


def test_policies_are_made_by_name() -> None:
    policy = make_policy(RouterConfig(), prefill_configured=True)
    assert isinstance(policy, LengthPolicy)


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"router.policy: got 'lenght'.*did you mean length"):
        make_policy(RouterConfig(policy="lenght"), prefill_configured=True)
