"""Attention in plain torch: right for any mix of chunks, the oracle of the fast ones."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.attention.interface import AttentionMetadata, HeadShape
from pdserve.engine.kernels.interface import Destination, Rope
from pdserve.engine.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of the step, prepared for every layer."""

    tokens: slice  # of the step's tokens
    context_len: int  # up to and with the chunk's last token
    blocks: Tensor  # [nb] int64, those that hold the context
    mask: Tensor | None  # [G * length, context_len], True where attended; None: everything


class SdpaAttention:
    """Gathers each chunk's context from its pages and calls ``F.scaled_dot_product_attention``."""

    def __init__(self, kv: KvCache, heads: HeadShape) -> None:
        self._kv = kv
        self._heads = heads
        self._block_size = kv.layout.block_size
        self._chunks: list[_Chunk] = []
        self._positions = torch.empty(0, dtype=torch.int64)  # [T]
        self._cells = torch.empty(0, dtype=torch.int64)  # [T] where each token's K and V go

    def plan(self, metadata: AttentionMetadata) -> None:
        tables = metadata.block_tables.long()
        device = tables.device
        lengths = torch.tensor(metadata.lengths, device=device)
        owners = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        self._positions = metadata.positions
        self._cells = metadata.cells(owners, self._block_size)
        self._chunks = []
        first = 0
        for row, (start, length) in enumerate(zip(metadata.starts, metadata.lengths, strict=True)):
            num_blocks = self._kv.layout.num_blocks_for(start + length)
            self._chunks.append(
                _Chunk(
                    tokens=slice(first, first + length),
                    context_len=start + length,
                    blocks=tables[row, :num_blocks],
                    mask=self._mask(metadata.positions[first : first + length], start + length),
                )
            )
            first += length

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        to = Destination(pages=self._kv.layer_view(layer), cells=self._cells)
        rope.rotate_and_write(q, k, v, self._positions, to)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for chunk in self._chunks:
            out[chunk.tokens] = self._attend(layer, q[chunk.tokens], chunk)
        return out

    def _attend(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        heads, size = self._heads, self._heads.head_size
        pages = self._kv.layer_view(layer)[chunk.blocks]  # [nb, Hkv, 2, B, D]
        context = pages.permute(2, 1, 0, 3, 4).reshape(2, heads.num_kv_heads, -1, size)
        # Rows behind the context were never written and may hold NaN: cut off, not masked.
        k, v = context[:, :, : chunk.context_len].to(q.dtype)  # [Hkv, C, D] each
        # Query heads of one KV head become more rows of it: SDPA's own GQA is slow on CPU.
        folded = q.reshape(len(q), heads.num_kv_heads, heads.group_size, size)  # [T, Hkv, G, D]
        folded = folded.permute(1, 2, 0, 3).reshape(heads.num_kv_heads, -1, size)  # [Hkv, G*T, D]
        attended = F.scaled_dot_product_attention(
            folded[None], k[None], v[None], attn_mask=chunk.mask, scale=heads.scale
        )[0]
        unfolded = attended.view(
            heads.num_kv_heads, heads.group_size, len(q), size
        )  # [Hkv, G, T, D]
        return unfolded.permute(2, 0, 1, 3).reshape(len(q), -1)

    def _mask(self, positions: Tensor, context_len: int) -> Tensor | None:
        window = self._heads.sliding_window
        if len(positions) == 1 and (window is None or context_len <= window):
            return None
        keys = torch.arange(context_len, device=positions.device)
        mask = keys <= positions[:, None]
        if window is not None:
            mask &= keys > positions[:, None] - window
        return mask.repeat(self._heads.group_size, 1)
