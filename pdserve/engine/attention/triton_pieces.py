"""The results of ``triton_kernels.py``: rows that one program has whole, and sums of pieces."""

import triton
import triton.language as tl


@triton.jit
def end_row(
    out,
    pieces,
    piece_sums,
    mixed,
    top,
    norm,
    is_whole,
    seq,
    head,
    place,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Write the row, or its last piece to ``place``."""
    if is_whole:
        write_rows(out, mixed / norm[:, None], seq, head, HKV, GROUP, ROWS, D, DP)
    else:
        write_piece(pieces, piece_sums, place, mixed, top, norm, GROUP, ROWS, DP)


@triton.jit
def write_rows(
    out,
    values,
    seq,
    head,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    elements = tl.arange(0, DP)
    places = ((seq.to(tl.int64) * HKV + head) * GROUP + rows) * D
    inside = (rows < GROUP)[:, None] & (elements < D)[None, :]
    tl.store(out + places[:, None] + elements[None, :], values, mask=inside)


@triton.jit
def write_piece(
    pieces,
    piece_sums,
    place,
    mixed,
    top,
    norm,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DP: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    elements = tl.arange(0, DP)
    places = (place * GROUP + rows)[:, None] * DP + elements[None, :]
    tl.store(pieces + places, mixed, mask=(rows < GROUP)[:, None])
    sums = piece_sums + place * 2 * GROUP + rows
    tl.store(sums, top, mask=rows < GROUP)
    tl.store(sums + GROUP, norm, mask=rows < GROUP)


@triton.jit
def arrive(
    out,
    arrivals,
    pieces,
    piece_sums,
    seq,
    head,
    row_begin,
    row_end,
    everything,
    num_programs,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ADDED: tl.constexpr,
):
    """A piece of this row is written; whoever writes the last one adds all of them up.

    Program p has the tiles from ``everything * p // num_programs`` on.
    """
    first = ((row_begin + 1) * num_programs - 1) // everything
    count = ((row_end * num_programs - 1) // everything - first + 1).to(tl.int32)
    counter = arrivals + seq * HKV + head
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before == count - 1:
        tl.store(counter, 0)  # for the next layer
        GP: tl.constexpr = triton.next_power_of_2(GROUP)
        AT_ONCE: tl.constexpr = max(ADDED // (GP * DP), 1)
        rows = tl.arange(0, GP)
        elements = tl.arange(0, DP)
        numbers = tl.arange(0, AT_ONCE)
        top = tl.full((GP,), float("-inf"), dtype=tl.float32)
        norm = tl.zeros((GP,), dtype=tl.float32)
        mixed = tl.zeros((GP, DP), dtype=tl.float32)
        for i in range(0, count, AT_ONCE):
            number = i + numbers
            place = 2 * (first + number) + (number == 0)  # the first is its program's second
            inside = (number < count)[:, None] & (rows < GROUP)[None, :]
            sums = piece_sums + (place * 2 * GROUP)[:, None] + rows[None, :]
            tops = tl.load(sums, mask=inside, other=float("-inf"), cache_modifier=".cg")
            norms = tl.load(sums + GROUP, mask=inside, other=0.0, cache_modifier=".cg")
            places = (place * GROUP)[:, None] + rows[None, :]
            values = tl.load(
                pieces + places[:, :, None] * DP + elements[None, None, :],
                mask=inside[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, tl.max(tops, 0))
            new_top = tl.where(rows < GROUP, new_top, 0.0)
            weights = tl.exp2(tops - new_top[None, :])
            shrink = tl.exp2(top - new_top)
            norm = norm * shrink + tl.sum(weights * norms, 0)
            mixed = mixed * shrink[:, None] + tl.sum(weights[:, :, None] * values, 0)
            top = new_top
        norm = tl.where(rows < GROUP, norm, 1.0)
        write_rows(out, mixed / norm[:, None], seq, head, HKV, GROUP, GP, D, DP)
