"""Readiness, the length that fits, and the status, from the views of nodes."""

from dataclasses import replace

import pytest

from pdserve.core.node import Role
from pdserve.core.request import RouteTaken
from router.nodes import NodeView
from router.overview import Readiness, max_model_len, readiness, status
from tests.router.test_load_book import view

DECODE = view("d0", Role.DECODE)
PREFILL = view("p0", Role.PREFILL)


def lost(node: NodeView) -> NodeView:
    return replace(node, session=None, state=None, problem=f"{node.name} hung up")


def unconnected(node: NodeView) -> NodeView:
    assert node.state is not None
    return replace(node, state=replace(node.state, connected_prefill_nodes=()))


@pytest.mark.parametrize(
    ("views", "had_pair", "word", "reason"),
    [
        ((), False, "not ready", "no decode node is ready"),
        ((PREFILL,), False, "not ready", "no decode node is ready"),
        ((DECODE,), False, "not ready", "no prefill node is ready"),
        ((DECODE, lost(PREFILL)), False, "not ready", "p0 hung up"),
        ((unconnected(DECODE), PREFILL), False, "not ready", "no decode node is connected"),
        ((DECODE, PREFILL), False, "ready", None),
        ((DECODE, lost(PREFILL)), True, "degraded", "p0 hung up"),
        ((lost(DECODE), PREFILL), True, "not ready", "d0 hung up"),
    ],
)
def test_readiness_needs_a_pair_at_first_and_a_decode_node_always(
    views: tuple[NodeView, ...], had_pair: bool, word: str, reason: str | None
) -> None:
    state = readiness(views, prefill_configured=True, had_pair=had_pair)
    assert state.word == word
    assert (reason is None) == (state.reason is None)
    assert reason is None or reason in str(state.reason)


def test_a_cluster_without_prefill_nodes_is_ready_with_a_decode_node() -> None:
    state = readiness((DECODE,), prefill_configured=False, had_pair=False)
    assert state == Readiness(ready=True, reason=None)


def test_what_fits_is_what_the_smallest_decode_node_takes() -> None:
    small = replace(DECODE, max_model_len=200)
    silent = replace(DECODE, max_model_len=None)
    assert max_model_len([DECODE, small, silent, PREFILL], 4096) == 200
    assert max_model_len([DECODE], 100) == 100
    assert max_model_len([silent], 4096) == 4096


def test_the_status_names_nodes_and_all_routes() -> None:
    state = readiness((DECODE, PREFILL), prefill_configured=True, had_pair=True)
    shown = status(
        [DECODE, lost(PREFILL)],
        routes={RouteTaken.DISAGGREGATED: 3, RouteTaken.LOCAL: 0, RouteTaken.FALLBACK: 0},
        readiness=state,
        num_requests=2,
    )
    assert shown["routes"] == {"disaggregated": 3, "local": 0, "fallback": 0}
    nodes = shown["nodes"]
    assert isinstance(nodes, list)
    nodes.reverse()  # prefill nodes come first
    assert (nodes[0]["name"], nodes[0]["role"], nodes[0]["free_blocks"]) == ("d0", "decode", 90)
    assert (nodes[1]["ready"], nodes[1]["total_blocks"]) == (False, None)
