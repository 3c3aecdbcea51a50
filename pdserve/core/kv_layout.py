"""How one node keeps its KV cache: which rank holds which heads, and the shape of a block.

A rank's cache is one tensor ``[N, Hkv, L, 2, B, D]`` (blocks, local KV heads, layers, k/v, block
size, head size). A block is one contiguous run over all layers, and so is any range of its heads.
Blocks start on 512-byte borders. Pure arithmetic; no torch.
"""

from dataclasses import dataclass
from typing import NewType

from pdserve.core.errors import ConfigError

BlockId = NewType("BlockId", int)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_ALIGNMENT_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The KV cache layout of a TP group. ``num_kv_heads`` counts the whole model's heads."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    tp_size: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"kv_cache.dtype: {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        larger, smaller = sorted((self.tp_size, self.num_kv_heads), reverse=True)
        if larger % smaller:
            raise ConfigError(
                f"tensor_parallel_size: {self.tp_size} ranks cannot share {self.num_kv_heads} "
                f"KV heads evenly; use a divisor or a multiple of {self.num_kv_heads}"
            )

    def heads_of(self, rank: int) -> range:
        """The model's KV heads that ``rank`` holds; with more ranks than heads, neighbours hold the
        same one.
        """
        if self.tp_size >= self.num_kv_heads:
            head = rank * self.num_kv_heads // self.tp_size
            return range(head, head + 1)
        per_rank = self.num_kv_heads // self.tp_size
        return range(rank * per_rank, (rank + 1) * per_rank)

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``[Hkv, L, 2, B, D]`` of one rank."""
        return (self.heads_per_rank, self.num_layers, 2, self.block_size, self.head_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers on one rank."""
        per_head = self.num_layers * 2 * self.head_size * DTYPE_BYTES[self.dtype]
        return self.heads_per_rank * per_head

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on one rank, without padding."""
        return self.token_bytes * self.block_size

    @property
    def block_stride_bytes(self) -> int:
        """Distance between the starts of two neighbouring blocks."""
        return -(-self.block_bytes // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)
