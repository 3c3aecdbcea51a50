"""A block pool as tests look at it."""

from pdserve.core.kv_layout import BlockId
from pdserve.engine.block_pool import BlockPool


def empty_blocks(pool: BlockPool) -> list[BlockId]:
    """Blocks that hold nothing anybody may read: without owners, and not in the prefix cache."""
    blocks = map(BlockId, range(pool.num_blocks))
    return [b for b in blocks if not pool.num_owners(b) and not pool.cache.is_idle(b)]
