"""The Triton kernels of ``skinny_product.py``.

A program owns some outputs and goes through all inputs, or several share the inputs and one of them
adds up what each has, in their order: the result does not depend on who is first. Nothing is read
before the wait but weights, which nobody writes.
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
    pieces,
    arrivals,
    num_rows,
    out_size,
    in_size,
    x_stride,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
):
    """x ``[num_rows, in]``, filled up to ``ROWS``, which is what the matrix units take. ``LEFT``:
    the weights stand on the left, where they fill the rows of Hopper's units.

    ``GATED``, with weights on the left: of ``2 * out`` rows of weights a program takes some and
    those ``out`` further on; SiLU of what the first give times what the others give is the result.

    ``SPLITS``, with weights on the left: so many programs share the inputs; each leaves its piece
    of the sum, and the last to arrive adds all of them up, in their order.
    """
    gdc_launch_dependents()
    gdc_wait()
    tile = tl.program_id(0)
    place = tl.arange(0, COLUMNS)
    if GATED:
        column = tile * (COLUMNS // 2) + place % (COLUMNS // 2) + place // (COLUMNS // 2) * out_size
    else:
        column = tile * COLUMNS + place
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    num_steps = in_size // (SPLITS * DEPTH)
    first = tl.program_id(1) * num_steps * DEPTH
    weights = weight + column[:, None].to(tl.int64) * in_size + (first + depth)[None, :]
    inputs = x + row[:, None] * x_stride + (first + depth)[None, :]
    if LEFT:
        total = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for _ in range(num_steps):
        block = tl.load(weights, eviction_policy="evict_first")
        given = tl.load(inputs, mask=(row < num_rows)[:, None], other=0.0)
        total = tl.dot(block, given.T, total) if LEFT else tl.dot(given, block.T, total)
        weights += DEPTH
        inputs += DEPTH
    if SPLITS == 1:
        _finish(out, total, bias, column, num_rows, out_size, HAS_BIAS, ROWS, COLUMNS, LEFT, GATED)
    else:
        SIZE: tl.constexpr = COLUMNS * ROWS
        piece = pieces + tile * (SPLITS * SIZE) + place[:, None] * ROWS + row[None, :]
        tl.store(piece + tl.program_id(1) * SIZE, total)
        tl.debug_barrier()  # the piece is written before this program says so
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)  # for the next time
            whole = tl.load(piece, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                whole += tl.load(piece + split * SIZE, cache_modifier=".cg")
            _finish(
                out, whole, bias, column, num_rows, out_size, HAS_BIAS, ROWS, COLUMNS, LEFT, GATED
            )


@triton.jit
def _finish(
    out,
    total,
    bias,
    column,
    num_rows,
    out_size,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEFT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Bias, gate, and the write of a program's outputs."""
    MINE: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    if HAS_BIAS:
        offset = tl.load(bias + column).to(tl.float32)
        total += offset[:, None] if LEFT else offset[None, :]
    if GATED:
        gate, up = tl.split(total.reshape(2, MINE, ROWS).permute(1, 2, 0))
        gate = gate.to(out.dtype.element_ty).to(tl.float32)  # rounded as in two kernels
        total = gate * tl.sigmoid(gate) * up.to(out.dtype.element_ty).to(tl.float32)
    if LEFT:
        total = total.T
    row = tl.arange(0, ROWS)
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    mask = (row < num_rows)[:, None] & (mine >= 0)[None, :]
    cells = out + row[:, None] * out_size + mine[None, :]
    tl.store(cells, total.to(out.dtype.element_ty), mask=mask)
