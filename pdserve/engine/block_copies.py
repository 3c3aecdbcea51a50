"""Copies of blocks that the next batch will carry: the partly filled last blocks of forks.

Both ends are held by the copy itself, from when it is asked for until the step that does it has
retired (``BlockCopies.take`` hands that share on).
"""

from collections.abc import Iterable

from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import BlockCopy
from pdserve.engine.block_pool import BlockPool


class BlockCopies:
    """What is to be copied before the next step's forward."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._copies: list[BlockCopy] = []

    def add(self, source: BlockId, destination: BlockId) -> None:
        """``destination`` will hold what is in ``source``, or what a copy is to bring there."""
        befores = (copy.source for copy in self._copies if copy.destination == source)
        source = next(befores, source)
        self._pool.share([source, destination])
        self._copies.append(BlockCopy(source=source, destination=destination))

    def take(self) -> tuple[BlockCopy, ...]:
        """All copies, for a step. Whoever takes them frees both ends when it has retired."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def drop_pointless(self) -> None:
        """Forget copies into blocks that nobody else holds any more."""
        kept = []
        for copy in self._copies:
            if self._pool.num_owners(copy.destination) > 1:
                kept.append(copy)
            else:
                self._pool.free(ends_of([copy]))
        self._copies = kept


def ends_of(copies: Iterable[BlockCopy]) -> list[BlockId]:
    """Every block that these copies read or write, once for each."""
    return [block for copy in copies for block in (copy.source, copy.destination)]
