"""The blocks of one node's KV cache: every block is free, or owned and counted.

The front owns this bookkeeping; the ranks only ever see block ids. A block that several sequences
share has one count for each. Not thread-safe: the node's loop is the only user.
"""

from collections.abc import Iterable

from pdserve.core.kv_layout import BlockId


class BlockPool:
    """``num_blocks`` blocks with ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._counts = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[BlockId]:
        """Take ``count`` free blocks, each with one owner. The caller has checked ``num_free``."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one owner to each of these owned blocks."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is free"
            self._counts[block] += 1

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Take one owner from each; blocks without owners are free again."""
        for block in blocks:
            assert self._counts[block] > 0, f"block {block} is freed twice"
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free.append(block)

    def num_owners(self, block: BlockId) -> int:
        return self._counts[block]

    def check(self) -> None:
        """Assert the invariant: every block is either in the free list, once, or has owners."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block, count in enumerate(self._counts):
            assert (count == 0) == (block in free), f"block {block}: {count} owners"
