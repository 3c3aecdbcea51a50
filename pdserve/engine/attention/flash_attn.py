"""Attention on NVIDIA GPUs by FlashAttention 4 (package ``flash-attn-4``); ``sdpa.py`` is its
oracle.

Chunks of any lengths run in one call, without padding, over the pages as they lie; where every
chunk is the first of its prompt, over the step's own K and V. Loaded by name: the package is
optional.
"""

import torch
from flash_attn.cute.interface import flash_attn_varlen_func
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.interface import AttentionMetadata, HeadShape
from pdserve.engine.kernels.interface import Destination, Rope
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.staging import on_device

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = range(8, 129, 8)
ARCHITECTURES = (9, 10)  # Hopper, Blackwell
LONGEST_AT_LEAST = 64  # told of shorter chunks the package compiles once more, in a request


class FlashAttention:
    """For caches in 16 bits; a model in float32 attends in the cache's type."""

    captures_chunks = True

    def __init__(self, kv: KvCache, heads: HeadShape) -> None:
        _check(kv, heads)
        self._kv = kv
        self._heads = heads
        window = heads.sliding_window
        self._window = (None, None) if window is None else (window - 1, 0)
        self._positions = self._cells = torch.empty(0, dtype=torch.int64)  # [T] each
        self._first_tokens = self._context_lens = torch.empty(0, dtype=torch.int32)  # [S+1], [S]
        self._block_tables = torch.empty(0, dtype=torch.int32)  # [S, M]
        self._longest = self._longest_context = 0
        self._is_first = False  # of every chunk

    def plan(self, metadata: AttentionMetadata) -> None:
        lengths, tables = metadata.lengths, metadata.block_tables
        ends = [start + length for start, length in zip(metadata.starts, lengths, strict=True)]
        firsts = [0]
        for length in lengths:
            firsts.append(firsts[-1] + length)
        packed = on_device([*firsts, *ends, *lengths], torch.int32, tables.device)
        num_firsts, num_chunks = len(firsts), len(lengths)
        self._first_tokens = packed[:num_firsts]
        self._context_lens = packed[num_firsts : num_firsts + num_chunks]
        lengths_there = packed[num_firsts + num_chunks :]
        owners = torch.repeat_interleave(lengths_there, output_size=firsts[-1])
        self._positions = metadata.positions
        self._cells = metadata.cells(owners, self._kv.layout.block_size)
        self._block_tables = tables
        self._longest, self._longest_context = max(*lengths, LONGEST_AT_LEAST), max(ends)
        self._is_first = not any(metadata.starts)

    def plan_decodes(self, positions: Tensor, block_tables: Tensor) -> None:
        num_seqs, num_blocks = block_tables.shape
        block_size = self._kv.layout.block_size
        blocks = (positions // block_size)[:, None]
        self._first_tokens = torch.arange(
            num_seqs + 1, dtype=torch.int32, device=block_tables.device
        )
        self._context_lens = positions.int() + 1
        block_ids = block_tables.gather(1, blocks)[:, 0].long()
        self._positions = positions
        self._cells = block_ids * block_size + positions % block_size
        self._block_tables = block_tables
        self._longest, self._longest_context = 1, num_blocks * block_size
        self._is_first = False

    def plan_chunks(
        self,
        ends: Tensor,
        context_lens: Tensor,
        owners: Tensor,
        positions: Tensor,
        block_tables: Tensor,
    ) -> None:
        block_size = self._kv.layout.block_size
        self._first_tokens = torch.cat((ends.new_zeros(1), ends)).int()
        self._context_lens = context_lens.int()
        block_ids = block_tables[owners, positions // block_size].long()
        self._positions = positions
        self._cells = block_ids * block_size + positions % block_size
        self._block_tables = block_tables
        self._longest = len(positions)
        self._longest_context = block_tables.shape[1] * block_size
        self._is_first = False

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        to = Destination(pages=self._kv.layer_view(layer), cells=self._cells)
        rope.rotate_and_write(q, k, v, self._positions, to)
        dtype = self._kv.dtype
        queries = q.to(dtype)
        if self._is_first:
            out = self._attend_to_step(queries, k.to(dtype), v.to(dtype))
        else:
            k_pages, v_pages = self._kv.page_view(layer)  # [N, B, Hkv, D]
            out = self._attend_to_pages(queries, k_pages, v_pages)
        return out.view(q.shape[0], -1).to(q.dtype)

    def _attend_to_step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=self._first_tokens,
            cu_seqlens_k=self._first_tokens,
            max_seqlen_q=self._longest,
            max_seqlen_k=self._longest,
            softmax_scale=self._heads.scale,
            causal=True,
            window_size=self._window,
        )[0]
        return out

    def _attend_to_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=self._first_tokens,
            seqused_k=self._context_lens,
            page_table=self._block_tables,
            max_seqlen_q=self._longest,
            max_seqlen_k=self._longest_context,
            softmax_scale=self._heads.scale,
            causal=True,
            window_size=self._window,
        )[0]
        return out


def _check(kv: KvCache, heads: HeadShape) -> None:
    """Raise ConfigError where the package has no kernel for this cache on this GPU."""
    device = kv.tensor.device
    why = None
    if device.type != "cuda":
        why = f"runs on GPUs, not on {device.type}"
    elif (major := torch.cuda.get_device_capability(device)[0]) not in ARCHITECTURES:
        why = f"has kernels for compute capability 9 and 10, not for {major}"
    elif kv.dtype not in DTYPES:
        why = f"takes bfloat16 or float16 KV, not {kv.dtype}"
    elif heads.head_size not in HEAD_SIZES:
        why = f"takes head sizes of 8 to 128 that divide by 8, not {heads.head_size}"
    if why is not None:
        raise ConfigError(f"attention_backend: 'flash_attn' {why}; use 'sdpa'")
