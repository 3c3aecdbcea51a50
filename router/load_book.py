"""What this router itself has put on each node, added to what the nodes say of themselves.

A node's word is up to a second old, so a burst routed by it alone would all go to one node. Pure.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.core.node import Role
from router.nodes import NodeView
from router.policy import DecodeLoad, Loads, PrefillLoad


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """What one leg is to the nodes of its route; two legs are never the same placement."""

    decode_node: str
    prefill_node: str | None  # the first of the route; None: the decode node prefills
    num_choices: int
    prefill_len: int  # tokens to be computed for it
    context_len: int  # tokens of KV that its choices have on the decode node, at first


class LoadBook:
    """Counts placements: ``add`` at submission, ``prefilled`` at the first token, ``remove`` at
    the end.
    """

    def __init__(self) -> None:
        self._choices = _Ledger()
        self._tokens = _Ledger()
        self._context = _Ledger()

    def add(self, placement: Placement) -> None:
        node = placement.decode_node
        self._choices.add(node, placement, placement.num_choices)
        self._context.add(node, placement, placement.context_len)
        self._tokens.add(placement.prefill_node or node, placement, placement.prefill_len)

    def prefilled(self, placement: Placement) -> None:
        node = placement.prefill_node or placement.decode_node
        self._tokens.remove(node, placement)

    def remove(self, placement: Placement) -> None:
        self.prefilled(placement)
        self._choices.remove(placement.decode_node, placement)
        self._context.remove(placement.decode_node, placement)

    def heard(self, node: str) -> None:
        """The node told its state: what was sent before is in it."""
        for ledger in (self._choices, self._tokens, self._context):
            ledger.heard(node)

    def loads(self, views: Iterable[NodeView]) -> Loads:
        """The loads of all ready nodes."""
        ready = [view for view in views if view.ready]
        return Loads(
            decode=tuple(self._decode_load(view) for view in ready if view.role is Role.DECODE),
            prefill=tuple(self._prefill_load(view) for view in ready if view.role is Role.PREFILL),
        )

    def _decode_load(self, view: NodeView) -> DecodeLoad:
        state = view.state
        assert state is not None, "a ready node told its state"
        return DecodeLoad(
            name=view.name,
            num_requests=self._choices.load(view.name, state.running + state.waiting),
            free_blocks=state.free_blocks,
            block_size=state.block_size,
            prefill_nodes=frozenset(state.connected_prefill_nodes),
            context_tokens=self._context.load(view.name, state.context_tokens),
            queued_tokens=self._tokens.load(view.name, state.queued_prefill_tokens),
            prefill_chunk=state.prefill_chunk,
            costs=state.costs,
        )

    def _prefill_load(self, view: NodeView) -> PrefillLoad:
        assert view.state is not None, "a ready node told its state"
        return PrefillLoad(
            name=view.name,
            queued_tokens=self._tokens.load(view.name, view.state.queued_prefill_tokens),
            prefill_chunk=view.state.prefill_chunk,
            costs=view.state.costs,
        )


class _Ledger:
    """Amounts per node: all that this router has there, and what it sent since the node spoke last.

    The node's word knows everything but the latter; it can lack what is still on its way, so a
    load is never taken for less than the former.
    """

    def __init__(self) -> None:
        self._amounts: defaultdict[str, dict[Placement, int]] = defaultdict(dict)
        self._totals: Counter[str] = Counter()
        self._fresh: defaultdict[str, dict[Placement, int]] = defaultdict(dict)

    def add(self, node: str, placement: Placement, amount: int) -> None:
        self._amounts[node][placement] = amount
        self._totals[node] += amount
        self._fresh[node][placement] = amount

    def remove(self, node: str, placement: Placement) -> None:
        """A second removal has no effect."""
        self._totals[node] -= self._amounts[node].pop(placement, 0)
        self._fresh[node].pop(placement, None)

    def heard(self, node: str) -> None:
        self._fresh[node].clear()

    def load(self, node: str, told: int) -> int:
        return max(told + sum(self._fresh[node].values()), self._totals[node])
