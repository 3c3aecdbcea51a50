"""Which beginnings of prompts this router has sent to which nodes, as far as it remembers.

Bounded: of all blocks the last used are kept, and of a prompt's blocks the first stay longest. A
node is named with its incarnation, so what a dead one had is never looked for on its successor, and
of a block each name has one. It is a guess of what nodes have cached; they alone know. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.core.node import NodeAddress
from pdserve.core.prefix_hash import PrefixHash, prefix_hashes
from pdserve.core.routing_config import PrefixConfig


class PrefixIndex:
    """``blocks_of`` names a prompt's blocks; ``sent`` notes them, ``cached`` looks them up."""

    def __init__(self, config: PrefixConfig) -> None:
        self._max_entries = config.max_entries
        self._block_size = config.block_size
        # Of each block the nodes that were sent it, by name, with their incarnations.
        self._holders: OrderedDict[PrefixHash, dict[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def blocks_of(self, token_ids: Sequence[int], salt: bytes) -> tuple[PrefixHash, ...]:
        """The names of the prompt's full blocks; none where nothing is remembered."""
        return prefix_hashes(token_ids, self._block_size, salt) if self._max_entries else ()

    def sent(self, blocks: Sequence[PrefixHash], nodes: Iterable[NodeAddress]) -> None:
        """A prompt with these blocks was sent to these nodes."""
        holders = {node.name: node.incarnation for node in nodes}
        for block in reversed(blocks[: self._max_entries]):  # the first ones are the last used
            self._holders.setdefault(block, {}).update(holders)
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)

    def cached(self, blocks: Sequence[PrefixHash], nodes: Iterable[NodeAddress]) -> dict[str, int]:
        """Tokens of the prompt's beginning that each of these nodes was sent; 0 is left out."""
        searched = {(node.name, node.incarnation) for node in nodes}
        lengths: dict[str, int] = {}
        for number, block in enumerate(blocks, 1):
            searched &= self._holders.get(block, {}).items()
            if not searched:
                break
            for name, _ in searched:
                lengths[name] = number * self._block_size
        return lengths
