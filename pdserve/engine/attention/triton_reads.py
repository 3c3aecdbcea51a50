"""What ``triton_kernels.py`` reads: queries, block tables, and tiles of K and V."""

import triton
import triton.language as tl


@triton.jit
def read_blocks(block_tables, seq, start, length, table_stride, B: tl.constexpr, BN: tl.constexpr):
    """The block of a tile, or of each position; 0 behind the list."""
    places = start
    if B % BN != 0:
        places += tl.arange(0, BN)
    entries = block_tables + seq.to(tl.int64) * table_stride + places // B
    return tl.load(entries, mask=places < length, other=0)


@triton.jit
def are_seen(places, length, WINDOW: tl.constexpr):
    """Whether a sequence of this length sees these positions."""
    seen = places < length
    if WINDOW:
        seen &= places >= length - WINDOW
    return seen


@triton.jit
def read_tile(
    kv,
    blocks,
    head,
    start,
    seen,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
):
    """K and V ``[BN, DP]``; V is zero where it is not seen, K may be anything there."""
    columns = tl.arange(0, BN)
    elements = tl.arange(0, DP)
    inside = seen[:, None] & (elements < D)[None, :]
    if B % BN == 0:
        page = kv + (blocks.to(tl.int64) * BLOCK_STRIDE + head * HEAD_STRIDE + start % B * D)
        places = page + (columns[:, None] * D + elements[None, :])
    else:
        rows = blocks.to(tl.int64) * BLOCK_STRIDE + head * HEAD_STRIDE + (start + columns) % B * D
        places = kv + rows[:, None] + elements[None, :]
    # All of a tile may be read that lies in one block.
    k = tl.load(places) if B % BN == 0 and D == DP else tl.load(places, mask=inside, other=0.0)
    return k, tl.load(places + B * D, mask=inside, other=0.0)


@triton.jit
def read_queries(
    q,
    seq,
    head,
    length,
    row_stride,
    head_stride,
    dtype: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """The queries ``[ROWS, DP]`` of a KV head, filled up with zeros; all zeros behind the list."""
    rows = tl.arange(0, ROWS)
    elements = tl.arange(0, DP)
    places = seq.to(tl.int64) * row_stride + (head * GROUP + rows) * head_stride
    inside = ((rows < GROUP) & (length > 0))[:, None] & (elements < D)[None, :]
    return tl.load(q + places[:, None] + elements[None, :], mask=inside, other=0.0).to(dtype)
