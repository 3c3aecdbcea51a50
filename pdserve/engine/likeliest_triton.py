"""``likeliest.py`` on a GPU: a program for each part of a row, then one for what they found."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


def keep_likeliest(logits: Tensor, kept: Tensor, tokens: Tensor) -> None:
    """For any float type; rows may be strided."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, BLOCK)
    largest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    _parts[(num_rows, num_parts)](
        logits,
        kept,
        largest,
        ids,
        logits.stride(0),
        kept.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _rows[(num_rows,)](
        tokens,
        largest,
        ids,
        num_parts,
        vocab_size,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )


@triton.jit
def _parts(
    logits,
    kept,
    largest,
    ids,
    stride,
    kept_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    values = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
    tl.store(kept + row * kept_stride + columns, values, mask=inside)
    wide = values.to(tl.float32)
    most = tl.max(wide)
    place = row * tl.num_programs(1) + part
    tl.store(largest + place, most)
    tl.store(ids + place, tl.min(tl.where(wide == most, columns, vocab_size - 1)))


@triton.jit
def _rows(
    tokens,
    largest,
    ids,
    num_parts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    inside = parts < num_parts
    most = tl.load(largest + row * num_parts + parts, mask=inside, other=float("-inf"))
    found = tl.load(ids + row * num_parts + parts, mask=inside, other=0)
    is_best = (most == tl.max(most)) & inside
    tl.store(tokens + row, tl.min(tl.where(is_best, found, vocab_size - 1)).to(tl.int64))
