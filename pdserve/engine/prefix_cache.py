"""Which of a node's blocks hold which prefix, and which of those could be given up first.

A block is *named* once the KV of all its tokens is computed and retired, or received. A named
block without owners is *idle*: still there for the next prompt that begins alike, and the first to
go when blocks run out, least recently used first. Knows names and idleness, no counts of owners:
those are the pool's.
"""

from collections import OrderedDict
from collections.abc import Sequence

from pdserve.core.kv_layout import BlockId
from pdserve.core.prefix_hash import PrefixHash


class PrefixCache:
    """Names of blocks. One block has at most one name, and one name at most one block."""

    def __init__(self) -> None:
        self._block_of: dict[PrefixHash, BlockId] = {}
        self._name_of: dict[BlockId, PrefixHash] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first

    @property
    def num_named(self) -> int:
        return len(self._name_of)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, names: Sequence[PrefixHash]) -> list[BlockId]:
        """The blocks of the longest run of these names, from the first one on."""
        found = []
        for name in names:
            if (block := self._block_of.get(name)) is None:
                break
            found.append(block)
        return found

    def is_named(self, block: BlockId) -> bool:
        return block in self._name_of

    def is_idle(self, block: BlockId) -> bool:
        return block in self._idle

    def name(self, block: BlockId, name: PrefixHash) -> None:
        """An owned block is complete. A name that another block has stays with that one."""
        assert block not in self._name_of, f"block {block} has a name"
        if name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def rest(self, block: BlockId) -> None:
        """A named block has lost its last owner."""
        assert block in self._name_of, f"block {block} has no name"
        self._idle[block] = None

    def wake(self, block: BlockId) -> None:
        """An idle block is owned again."""
        del self._idle[block]

    def evict(self) -> BlockId:
        """Give up the idle block that was used least recently. There is one."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._name_of.pop(block)]
        return block

    def check(self) -> None:
        """Assert that names and blocks are one to one, and that idle blocks are named."""
        assert {block: name for name, block in self._block_of.items()} == self._name_of
        assert self._idle.keys() <= self._name_of.keys()
