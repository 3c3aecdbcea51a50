"""Triton kernels of ``peer_group.py``: ranks write into each other's memory, tell and wait.

Every rank launches the same kernels in the same order with the same grids; program p of one works
with program p of the others only. A program numbers what it sends (its epochs), in memory, so that
a captured graph counts on. It uses a slot of the peer's memory again only once the peer has shown
that it is done with it: by what the peer sent later. Sums add in the order of the ranks, in
float32, and round once: all ranks hold equal bits.

A rank whose peer is gone waits here without end: who runs the ranks ends them together.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_quads"])
def sum_small(
    out,
    x,
    areas,
    counters,
    num_quads,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FLOAT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """``x`` and ``out`` in words of 32 bits, four times ``num_quads``; ``out`` may be ``x``.

    A word travels with its epoch beside it, in one store of 64 bits: whoever sees the epoch has the
    word, nothing else is waited for.

    ``areas``: of each rank ``[programs, 2, SIZE - 1, BLOCK]``. What is sent in epoch e + 2 may take
    the place of e: before e + 1 was sent, e had been read.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    epoch = tl.load(counters + program) + 1
    place = tl.arange(0, BLOCK)
    word = program * BLOCK + place
    inside = word < num_quads * 4
    own = tl.load(x + word, mask=inside, other=0)
    sent = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    slot = (program * 2 + (epoch & 1)) * ((SIZE - 1) * BLOCK)
    for step in tl.static_range(1, SIZE):
        there = areas[(RANK + step) % SIZE] + slot + (SIZE - 1 - step) * BLOCK + place
        tl.store(there, sent, mask=inside)
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            part = own
        else:
            there = areas[RANK] + slot + (source - RANK - 1 + SIZE) % SIZE * BLOCK + place
            part = _received(there, epoch, inside)
        low += _low(part, FLOAT)
        high += _high(part, FLOAT)
    tl.store(out + word, _word(low, high, FLOAT), mask=inside)
    tl.debug_barrier()  # every warp has read the counter
    tl.store(counters + program, epoch)


@triton.jit
def _received(places, epoch, inside):
    """The words that lie there, once all of them are of this epoch."""
    got = tl.load(places, mask=inside, other=0, volatile=True)
    while tl.max(((got >> 32).to(tl.int32) != epoch).to(tl.int32) * inside.to(tl.int32)) > 0:
        got = tl.load(places, mask=inside, other=0, volatile=True)
    return got.to(tl.int32)


@triton.jit
def _low(words, FLOAT: tl.constexpr):
    """The lower half of each word as a number, or a number that is the whole word."""
    if tl.float32 == FLOAT:
        return words.to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(FLOAT, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, FLOAT: tl.constexpr):
    if tl.float32 == FLOAT:
        return tl.zeros_like(words).to(tl.float32)
    else:
        return (words >> 16).to(tl.int16).to(FLOAT, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, FLOAT: tl.constexpr):
    if tl.float32 == FLOAT:
        return low.to(tl.int32, bitcast=True)
    else:
        low_bits = low.to(FLOAT).to(tl.int16, bitcast=True).to(tl.int32)
        high_bits = high.to(FLOAT).to(tl.int16, bitcast=True).to(tl.int32)
        return (low_bits & 0xFFFF) | (high_bits << 16)


@triton.jit(do_not_specialize=["num_rows"])
def exchange(
    out,
    x,
    areas,
    flags,
    counters,
    num_rows,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    AHEAD: tl.constexpr,
    MODE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Pieces of rows, each followed by a flag with its epoch. ``MODE``:

    - "sum": ``x`` ``[num_rows, width]`` → the sum, of the same shape; ``out`` may be ``x``.
    - "gather": ``x`` ``[num_rows, width]`` → ``[num_rows, SIZE * width]``, side by side.
    - "scatter": ``x`` ``[SIZE, width]`` → the sum of row ``RANK``, ``[width]``; ``num_rows`` is 1.

    ``areas``: of each rank ``[programs, SLOTS, SIZE - 1, BLOCK]``; ``flags``: ``[programs, SIZE -
    1]``. A program sends up to ``AHEAD`` pieces more before it takes one; SLOTS >= 2 + 2 * AHEAD,
    a power of two.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    num_pieces = tl.cdiv(width, BLOCK)  # of a row
    count = tl.cdiv(num_rows * num_pieces - program, tl.num_programs(0))
    epoch = tl.load(counters + program)
    for number in range(count + AHEAD):
        if number < count:
            row, column = _piece(number, num_pieces, BLOCK)
            slot = _slot(epoch + number + 1, SIZE, BLOCK, SLOTS)
            _send(out, x, areas, slot, row, column, width, RANK, SIZE, BLOCK, MODE)
            tl.debug_barrier()  # all warps have written: one thread tells it
            for step in tl.static_range(1, SIZE):
                flag = flags[(RANK + step) % SIZE] + program * (SIZE - 1) + SIZE - 1 - step
                tl.atomic_xchg(flag, epoch + number + 1, sem="release", scope="sys")
        if number >= AHEAD:
            now = epoch + number - AHEAD + 1
            for index in tl.static_range(SIZE - 1):
                flag = flags[RANK] + program * (SIZE - 1) + index
                while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - now < 0:
                    pass
            tl.debug_barrier()
            row, column = _piece(number - AHEAD, num_pieces, BLOCK)
            slot = areas[RANK] + _slot(now, SIZE, BLOCK, SLOTS)
            if MODE == "gather":
                _spread(out, slot, row, column, width, RANK, SIZE, BLOCK)
            else:
                _add(out, x, slot, row, column, width, RANK, SIZE, BLOCK, MODE)
    tl.debug_barrier()  # every warp has read the counter
    tl.store(counters + program, epoch + count)


@triton.jit
def _piece(number, num_pieces, BLOCK: tl.constexpr):
    """The row and the columns of this program's piece of that number."""
    piece = tl.program_id(0) + number * tl.num_programs(0)
    return (piece // num_pieces).to(tl.int64), piece % num_pieces * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _slot(epoch, SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    return (tl.program_id(0) * SLOTS + (epoch & (SLOTS - 1))) * ((SIZE - 1) * BLOCK)


@triton.jit
def _send(
    out,
    x,
    areas,
    slot,
    row,
    column,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """To each peer what it needs of a piece."""
    inside = column < width
    own = tl.load(x + row * width + column, mask=inside)
    for step in tl.static_range(1, SIZE):
        if MODE == "scatter":
            own = tl.load(x + (RANK + step) % SIZE * width.to(tl.int64) + column, mask=inside)
        there = areas[(RANK + step) % SIZE] + slot + (SIZE - 1 - step) * BLOCK
        tl.store(there + tl.arange(0, BLOCK), own, mask=inside)
    if MODE == "gather":
        tl.store(out + (row * SIZE + RANK) * width + column, own, mask=inside)


@triton.jit
def _spread(
    out,
    slot,
    row,
    column,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the peers sent to its places in the row."""
    inside = column < width
    for step in tl.static_range(1, SIZE):
        there = slot + (step - 1) * BLOCK + tl.arange(0, BLOCK)
        part = tl.load(there, mask=inside, cache_modifier=".cg")
        tl.store(out + (row * SIZE + (RANK + step) % SIZE) * width + column, part, mask=inside)


@triton.jit
def _add(
    out,
    x,
    slot,
    row,
    column,
    width,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
):
    """A piece of this rank and those that the peers sent, in the order of the ranks."""
    inside = column < width
    own_row = row
    if MODE == "scatter":
        own_row += RANK
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(SIZE):
        if source == RANK:
            part = tl.load(x + own_row * width + column, mask=inside, other=0.0)
        else:
            there = slot + (source - RANK - 1 + SIZE) % SIZE * BLOCK + tl.arange(0, BLOCK)
            part = tl.load(there, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
