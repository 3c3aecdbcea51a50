"""Which decode nodes have room for a request, so that one goes to a node only when it can start.

Nodes reserve blocks themselves before any prefill is spent; theirs is the truth, and several
routers in front of one node need nothing of each other. What is counted here only keeps the queue
at the router, where nothing has been spent and where it can be ordered and bounded. Pure.

A node has room if, of the blocks that it said are free, without those that this router has placed
since and with those that came back since, enough are left for prompt and head-room, one for each
sequence that runs there and the share that stays empty (``kv_watermark``). So that no node idles
until the next word, ``max_sent_ahead`` requests may wait for blocks on the node itself. A node that
has nothing to do takes any request.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.core.config import LimitsConfig
from pdserve.core.node import Role
from pdserve.core.request import RequestKey
from router.nodes import NodeState, NodeView
from router.waiting import Demand


@dataclass(slots=True)
class _Node:
    """What this router has on a node, in blocks, and what of it the node has not spoken of."""

    placed: dict[RequestKey, int] = field(default_factory=dict)
    fresh: dict[RequestKey, int] = field(default_factory=dict)
    num_ahead: int = 0  # placed without room since the node spoke
    num_back: int = 0  # blocks that came back since


class HeadRoom:
    """``place`` for each leg that is submitted, ``end`` when it is over."""

    def __init__(self, limits: LimitsConfig, *, headroom_tokens: int) -> None:
        self._watermark = limits.kv_watermark
        self._max_ahead = limits.max_sent_ahead
        self._headroom_tokens = headroom_tokens
        self._nodes: defaultdict[str, _Node] = defaultdict(_Node)

    def full_nodes(self, views: Iterable[NodeView], demand: Demand) -> frozenset[str] | None:
        """The ready decode nodes that have no room for the request; None where all are full."""
        ready = [view for view in views if view.ready and view.role is Role.DECODE]
        full = frozenset(view.name for view in ready if not self._takes(view, demand))
        return None if len(full) == len(ready) else full

    def blocks_left(self, views: Iterable[NodeView]) -> dict[str, int]:
        """Of each decode node that told its state: the blocks that new requests could get."""
        return {
            view.name: max(0, int(self._left(self._nodes.get(view.name, _Node()), view.state)))
            for view in views
            if view.role is Role.DECODE and view.state is not None
        }

    def place(self, view: NodeView, key: RequestKey, demand: Demand) -> None:
        """The request was sent to the node."""
        if view.state is None:
            return
        node = self._nodes[view.name]
        if not self._has_room(node, view.state, demand):
            node.num_ahead += 1
        node.placed[key] = node.fresh[key] = self._num_blocks(view.state, demand)

    def end(self, name: str, key: RequestKey) -> None:
        """The request needs nothing of the node any more."""
        node = self._nodes[name]
        num_blocks = node.placed.pop(key, 0)
        if node.fresh.pop(key, None) is None:
            node.num_back += num_blocks

    def heard(self, name: str) -> None:
        """The node told its state: what was sent before is in it."""
        node = self._nodes[name]
        node.fresh.clear()
        node.num_ahead = node.num_back = 0
        if not node.placed:
            del self._nodes[name]

    def _takes(self, view: NodeView, demand: Demand) -> bool:
        assert view.state is not None, "a ready node told its state"
        node, state = self._nodes[view.name], view.state
        return (
            self._has_room(node, state, demand)
            or state.waiting_for_blocks + node.num_ahead < self._max_ahead
        )

    def _has_room(self, node: _Node, state: NodeState, demand: Demand) -> bool:
        if not node.placed and not state.running and not state.waiting:
            return True
        if state.waiting_for_blocks:
            return False  # what is free is for those
        return self._left(node, state) >= self._num_blocks(state, demand)

    def _left(self, node: _Node, state: NodeState) -> float:
        """What is free without what stays empty."""
        told = state.free_blocks - sum(node.fresh.values()) + node.num_back
        room = min(told, state.total_blocks - sum(node.placed.values()))
        return room - ((1 - self._watermark) * state.total_blocks + state.running)

    def _num_blocks(self, state: NodeState, demand: Demand) -> int:
        """What the node will reserve for it at first."""
        headroom = min(self._headroom_tokens, demand.max_tokens) * demand.num_choices
        num_blocks = -(-(demand.prompt_len + headroom) // state.block_size)
        return min(num_blocks, state.total_blocks)
