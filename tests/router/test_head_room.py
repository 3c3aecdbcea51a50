"""Which decode nodes have room: what they said, and what was placed there and came back since."""

from dataclasses import replace

import pytest

from pdserve.core.config import LimitsConfig
from pdserve.core.node import Role
from pdserve.core.request import RequestKey
from router.head_room import HeadRoom
from router.nodes import NodeView
from router.waiting import Demand
from tests.router.test_load_book import view

TOTAL, BLOCK_SIZE = 100, 16


def node(
    name: str = "d0", *, free: int = TOTAL, running: int = 1, waiting_for_blocks: int = 0
) -> NodeView:
    made = view(name, Role.DECODE)
    assert made.state is not None
    state = replace(
        made.state,
        free_blocks=free,
        running=running,
        waiting=waiting_for_blocks,
        waiting_for_blocks=waiting_for_blocks,
    )
    return replace(made, state=state)


def demand(num_blocks: int, *, max_tokens: int = 0) -> Demand:
    return Demand(prompt_len=num_blocks * BLOCK_SIZE, max_tokens=max_tokens, num_choices=1)


def room(*, watermark: float = 1.0, ahead: int = 0, headroom_tokens: int = 0) -> HeadRoom:
    limits = LimitsConfig(kv_watermark=watermark, max_sent_ahead=ahead)
    return HeadRoom(limits, headroom_tokens=headroom_tokens)


def key(number: int) -> RequestKey:
    return RequestKey(f"r{number}", 0)


@pytest.mark.parametrize(
    ("free", "num_blocks", "takes"),
    [(40, 39, True), (40, 40, False), (0, 1, False)],  # one block stays for the one that runs
)
def test_prompt_must_fit_beside_the_next_block_of_each_that_runs(
    free: int, num_blocks: int, takes: bool
) -> None:
    full = room().full_nodes([node(free=free)], demand(num_blocks))
    assert full == (frozenset() if takes else None)


@pytest.mark.parametrize(("max_tokens", "takes"), [(100, False), (32, True), (16, True)])
def test_head_room_is_for_output_that_can_come(max_tokens: int, takes: bool) -> None:
    wanted = demand(37, max_tokens=max_tokens)
    full = room(headroom_tokens=64).full_nodes([node(free=40)], wanted)
    assert (full is not None) == takes


def test_each_choice_has_a_head_room_of_its_own() -> None:
    wanted = replace(demand(30, max_tokens=100), num_choices=3)
    assert room(headroom_tokens=64).full_nodes([node(free=42)], wanted) is None
    assert room(headroom_tokens=64).full_nodes([node(free=43)], wanted) == frozenset()


def test_full_nodes_are_named_where_others_have_room() -> None:
    views = [node("d0", free=5), node("d1"), view("p0", Role.PREFILL)]
    assert room().full_nodes(views, demand(10)) == frozenset({"d0"})


def test_what_was_placed_since_the_node_spoke_is_not_free() -> None:
    book, decode = room(), node(free=40)
    book.place(decode, key(0), demand(30))
    assert book.full_nodes([decode], demand(20)) is None
    book.heard("d0")
    assert book.full_nodes([node(free=40)], demand(20)) == frozenset()


def test_what_is_on_its_way_counts_although_the_node_spoke() -> None:
    book, decode = room(), node()
    book.place(decode, key(0), demand(80))
    book.heard("d0")
    assert book.full_nodes([node()], demand(30)) is None


def test_what_ended_gives_its_blocks_back_at_once() -> None:
    book = room()
    book.place(node(), key(0), demand(60))
    book.heard("d0")
    told = node(free=40)
    assert book.full_nodes([told], demand(50)) is None
    book.end("d0", key(0))
    assert book.full_nodes([told], demand(50)) == frozenset()
    book.heard("d0")
    assert book.full_nodes([told], demand(50)) is None  # the node's word is the truth


def test_an_idle_node_takes_what_fills_it() -> None:
    book, idle = room(watermark=0.5), node(running=0)
    assert book.full_nodes([idle], demand(TOTAL)) == frozenset()
    book.place(idle, key(0), demand(TOTAL))
    assert book.full_nodes([idle], demand(1)) is None


@pytest.mark.parametrize(("free", "takes"), [(61, True), (60, False)])
def test_above_the_watermark_nothing_new_comes(free: int, takes: bool) -> None:
    full = room(watermark=0.5).full_nodes([node(free=free)], demand(10))
    assert (full is not None) == takes


def test_a_few_are_sent_ahead_so_that_a_full_node_never_idles() -> None:
    book, decode = room(ahead=2), node(free=5)
    for number in range(2):
        assert book.full_nodes([decode], demand(10)) == frozenset()
        book.place(decode, key(number), demand(10))
    assert book.full_nodes([decode], demand(10)) is None


@pytest.mark.parametrize(("waiting", "takes"), [(1, True), (2, False)])
def test_those_of_other_routers_that_wait_there_count_too(waiting: int, takes: bool) -> None:
    decode = node(free=50, waiting_for_blocks=waiting)
    assert (room(ahead=2).full_nodes([decode], demand(10)) is not None) == takes


def test_what_is_free_is_for_those_that_wait_there() -> None:
    assert room().full_nodes([node(free=50, waiting_for_blocks=1)], demand(1)) is None


def test_where_no_node_is_ready_there_is_no_room() -> None:
    lost = replace(node(), session=None, state=None)
    assert room().full_nodes([lost], demand(1)) is None
