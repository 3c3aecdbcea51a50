"""Routing: asking changes nothing, placing is remembered."""

from dataclasses import replace

import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.errors import NoNodeError
from pdserve.core.node import Role
from pdserve.core.request import RouteTaken
from pdserve.core.routing_config import PrefixConfig
from router.policy import make_policy
from router.prefix_index import PrefixIndex
from router.routing import Ask, Routing
from tests.router.test_load_book import view

BOTH = frozenset(Role)
VIEWS = (view("d0", Role.DECODE), view("d1", Role.DECODE), view("p0", Role.PREFILL))
IDS = tuple(range(100))
ASK = Ask(num_tokens=100, token_ids=IDS)


def make(policy: str = "prefix", caching: frozenset[Role] = BOTH) -> Routing:
    config = RouterConfig(policy=policy, local_prefill_below=0)
    index = PrefixIndex(PrefixConfig(block_size=16))
    return Routing(make_policy(config, prefill_configured=True), index, caching)


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "length"])
def test_a_question_is_answered_the_same_however_often_it_is_asked(policy: str) -> None:
    routing = make(policy)
    answers = [routing.ask(ASK, VIEWS) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]


def test_what_was_placed_counts_as_load_and_draws_what_begins_alike() -> None:
    routing = make()
    first = routing.ask(ASK, VIEWS)
    placement = routing.place(first, VIEWS)
    assert first.planned is RouteTaken.DISAGGREGATED
    assert (placement.decode_node, placement.prefill_node) == ("d0", "p0")
    assert (placement.prefill_len, placement.context_len) == (100, 100)
    again = routing.ask(ASK, VIEWS)
    assert again.prompt.cached == {"d0": 96, "p0": 96}
    assert again.decision.route.decode_node == "d0"  # although it has a request now
    assert [node.num_requests for node in again.loads.decode] == [1, 0]
    assert again.loads.prefill[0].queued_tokens == 100
    routing.remove(placement)
    assert [node.num_requests for node in routing.ask(ASK, VIEWS).loads.decode] == [0, 0]


def test_prompts_of_another_salt_are_not_drawn() -> None:
    routing = make()
    routing.place(routing.ask(ASK, VIEWS), VIEWS)
    other = routing.ask(replace(ASK, cache_salt=b"other"), VIEWS)
    assert other.prompt.cached == {}
    assert other.decision.route.decode_node == "d1"


@pytest.mark.parametrize(
    ("caching", "cached"),
    [
        (frozenset({Role.PREFILL}), {"p0": 96}),
        (frozenset({Role.DECODE}), {"d0": 96}),
        (frozenset(), {}),
    ],
)
def test_pools_that_keep_nothing_are_not_looked_at(
    caching: frozenset[Role], cached: dict[str, int]
) -> None:
    routing = make(caching=caching)
    routing.place(routing.ask(ASK, VIEWS), VIEWS)
    assert routing.ask(ASK, VIEWS).prompt.cached == cached


def test_a_node_made_anew_draws_nothing() -> None:
    routing = make()
    routing.place(routing.ask(ASK, VIEWS), VIEWS)
    fresh = tuple(replace(v, address=replace(v.address, incarnation="2")) for v in VIEWS)
    assert routing.ask(ASK, fresh).prompt.cached == {}


def test_without_nodes_there_is_no_route() -> None:
    with pytest.raises(NoNodeError):
        make().ask(ASK, ())
