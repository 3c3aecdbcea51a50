"""The Triton kernels of ``skinny_product.py``.

A program owns some outputs and goes through all inputs, so that no sum is split and the result does
not depend on who is first. Nothing is read before the wait but weights, which nobody writes.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def one_row_product(
    out,
    x,
    weight,
    bias,
    in_size,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """x ``[in]``. The first block of weights is in registers when the wait ends."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    weights = weight + column[:, None].to(tl.int64) * in_size + depth[None, :]
    block = tl.load(weights, eviction_policy="evict_first")
    gdc_launch_dependents()
    gdc_wait()
    sums = block.to(tl.float32) * tl.load(x + depth).to(tl.float32)[None, :]
    for done in range(DEPTH, in_size, DEPTH):
        block = tl.load(weights + done, eviction_policy="evict_first")
        sums += block.to(tl.float32) * tl.load(x + done + depth).to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + column).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_product(
    out,
    x,
    weight,
    bias,
    num_rows,
    out_size,
    in_size,
    x_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
):
    """x ``[num_rows, in]``, filled up to ``ROWS``, which is what the matrix units take. ``LEFT``:
    the weights stand on the left, where they fill the rows of Hopper's units.

    ``GATED``, with weights on the left: of ``2 * out`` rows of weights a program takes some and
    those ``out`` further on; SiLU of what the first give times what the others give is the result.
    """
    gdc_launch_dependents()
    gdc_wait()
    place = tl.arange(0, COLUMNS)
    if GATED:
        MINE: tl.constexpr = COLUMNS // 2
        column = tl.program_id(0) * MINE + place % MINE + place // MINE * out_size
    else:
        MINE: tl.constexpr = COLUMNS
        column = tl.program_id(0) * MINE + place
    row = tl.arange(0, ROWS)
    real = row < num_rows
    depth = tl.arange(0, DEPTH)
    weights = weight + column[:, None].to(tl.int64) * in_size + depth[None, :]
    inputs = x + row[:, None] * x_stride + depth[None, :]
    if LEFT:
        total = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(in_size // DEPTH):
        block = tl.load(weights, eviction_policy="evict_first")
        given = tl.load(inputs, mask=real[:, None], other=0.0)
        total = tl.dot(block, given.T, total) if LEFT else tl.dot(given, block.T, total)
        weights += DEPTH
        inputs += DEPTH
    if HAS_BIAS:
        offset = tl.load(bias + column).to(tl.float32)
        total += offset[:, None] if LEFT else offset[None, :]
    if GATED:
        gate, up = tl.split(total.reshape(2, MINE, ROWS).permute(1, 2, 0))
        gate = gate.to(out.dtype.element_ty).to(tl.float32)  # rounded as in two kernels
        total = gate * tl.sigmoid(gate) * up.to(out.dtype.element_ty).to(tl.float32)
    if LEFT:
        total = total.T
    first = tl.program_id(0) * MINE
    cells = out + row[:, None] * out_size + (first + tl.arange(0, MINE))[None, :]
    mask = real[:, None] & (tl.arange(0, MINE) >= 0)[None, :]
    tl.store(cells, total.to(out.dtype.element_ty), mask=mask)
