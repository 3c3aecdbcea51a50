"""The blocks of one node's KV cache: every block is free, idle in the prefix cache, or owned.

The front owns this bookkeeping; the ranks only ever see block ids. A block that several sequences
share has one count for each. Idle blocks hold a prefix that somebody may want again; whoever asks
for free blocks gets them too, once no other is left. Not thread-safe: the node's loop is the only
user.
"""

from collections.abc import Sequence

from pdserve.core.kv_layout import BlockId
from pdserve.engine.prefix_cache import PrefixCache


class BlockPool:
    """``num_blocks`` blocks with ids 0 .. num_blocks - 1. ``cache`` holds no block at first."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache()
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._counts = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: those that hold nothing, and idle ones."""
        return len(self._free) + self.cache.num_idle

    def allocate(self, count: int) -> list[BlockId]:
        """Take ``count`` free blocks, each with one owner. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = [self._free.pop() if self._free else self.cache.evict() for _ in range(count)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Add one owner to each of these owned or idle blocks."""
        for block in blocks:
            if self.cache.is_idle(block):
                self.cache.wake(block)
            else:
                assert self._counts[block] > 0, f"block {block} is free"
            self._counts[block] += 1

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Take one owner from each; blocks without owners are free again, or idle.

        The last ones become idle first, so that a prefix is given up from its end on.
        """
        for block in reversed(blocks):
            assert self._counts[block] > 0, f"block {block} is freed twice"
            self._counts[block] -= 1
            if self._counts[block]:
                continue
            if self.cache.is_named(block):
                self.cache.rest(block)
            else:
                self._free.append(block)

    def num_owners(self, block: BlockId) -> int:
        return self._counts[block]

    def check(self) -> None:
        """Assert the invariant: every block is in the free list, once, or idle, or has owners."""
        self.cache.check()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not any(self.cache.is_named(block) for block in free), "a free block has a name"
        for block in map(BlockId, range(self.num_blocks)):
            ways = (self._counts[block] > 0, block in free, self.cache.is_idle(block))
            assert sum(ways) == 1, f"block {block}: {self._counts[block]} owners"
