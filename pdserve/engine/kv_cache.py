"""One rank's KV cache: a single tensor of blocks, ``[N, Hkv, L, 2, B, D]``.

Owns the memory and its shape. Which block belongs to whom is decided elsewhere (the block pool).
"""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.kv_layout import BLOCK_ALIGNMENT_BYTES, BlockId, KvLayout
from pdserve.engine.batch import BlockCopy
from pdserve.engine.engine_config import DTYPES

POISON = 3.0e4  # large, but finite in every dtype: NaN in an unused row could reach an output


class KvCache:
    """``num_blocks`` blocks of ``layout``; ``tensor`` is strided so that they start aligned.

    Behind them lies one more, ``spare_block``, which nobody owns: tokens that only fill a step up
    are written there.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = DTYPES[layout.dtype]
        shape = layout.block_shape
        block_stride = layout.block_stride_bytes // self.dtype.itemsize
        size = (num_blocks + 1) * layout.block_stride_bytes
        raw = _memory(size + BLOCK_ALIGNMENT_BYTES, device)
        skip = -raw.data_ptr() % BLOCK_ALIGNMENT_BYTES
        flat = raw[skip : skip + size].view(self.dtype)
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self._with_spare = flat.as_strided((num_blocks + 1, *shape), (block_stride, *inner))
        self.tensor = self._with_spare[:num_blocks]
        self.spare_block = BlockId(num_blocks)

    def layer_view(self, layer: int) -> Tensor:
        """One layer as ``[N + 1, Hkv, 2, B, D]``, the spare block last, without copying."""
        return self._with_spare[:, :, layer]

    def page_view(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as ``[N + 1, B, Hkv, D]``, the spare block last, without copying."""
        pages = self.layer_view(layer)
        return pages[:, :, 0].transpose(1, 2), pages[:, :, 1].transpose(1, 2)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all of them from what was there before."""
        if copies:
            sources = [copy.source for copy in copies]
            destinations = [copy.destination for copy in copies]
            self.tensor[destinations] = self.tensor[sources]

    def poison(self, blocks: Sequence[BlockId]) -> None:
        """Debugging aid: a read of these blocks before they are written shows in the output."""
        self.tensor[list(blocks)] = POISON


def _memory(size: int, device: torch.device) -> Tensor:
    """``size`` bytes; on a CPU they take real memory when they are first written."""
    if device.type != "cpu":
        # Zeros: attention by TMA loads unused rows too, and 0 * NaN is NaN.
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Attention jumps from block to block; with small pages it waits for address translation.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
