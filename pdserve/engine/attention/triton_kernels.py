"""The Triton kernels of ``triton_decode.py``: one token of each sequence attends over its pages.

The work is a list of tiles, ``BN`` positions of one KV head of one sequence each, ordered by
sequence, head and position: a row of tiles. A fixed number of programs share the list evenly,
whatever the lengths are, so a program starts and ends inside rows and crosses from one to the next
without draining its loads. A row that lies in several programs is a sum of pieces: each leaves its
own, and the last to arrive adds them up. Block numbers are int64 before they are multiplied.

Reading at the memory's pace leaves a processor few instructions a tile. So a tile that lies in one
block is found by one number, and sums are scaled anew only where a larger score came.

From Hopper on ``attend`` is launched before the kernel before it has ended (programmatic dependent
launch): it reads its part of the plan, which is older, and waits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.engine.attention.triton_pieces import arrive, end_row, write_piece
from pdserve.engine.attention.triton_reads import (
    are_seen,
    read_blocks,
    read_queries,
    read_tile,
)

STEP = 1024  # sequences, or programs, that the planning kernel looks at together


@triton.jit
def num_skipped(length, WINDOW: tl.constexpr, BN: tl.constexpr):
    """Tiles before the first that a sequence of this length sees through the window."""
    skipped = length * 0
    if WINDOW:
        skipped = tl.maximum(length - WINDOW, 0) // BN
    return skipped


@triton.jit
def num_tiles(length, WINDOW: tl.constexpr, BN: tl.constexpr):
    return (length + BN - 1) // BN - num_skipped(length, WINDOW, BN)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "num_programs"],
    do_not_specialize_on_alignment=["positions"],
)
def plan_decodes(
    positions,
    block_tables,
    lengths,
    slots,
    starts,
    total,
    num_seqs,
    table_stride,
    num_programs,
    WINDOW: tl.constexpr,
    HKV: tl.constexpr,
    B: tl.constexpr,
    BN: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program a sequence: its part of the list, and the programs that start in it."""
    seq = tl.program_id(0)
    before = tl.zeros((), dtype=tl.int64)
    everything = tl.zeros((), dtype=tl.int64)
    for first in range(0, num_seqs, STEP):
        others = first + tl.arange(0, STEP)
        other_lengths = tl.load(positions + others, mask=others < num_seqs, other=-1) + 1
        tiles = num_tiles(other_lengths, WINDOW, BN).to(tl.int64) * HKV
        before += tl.sum(tl.where(others < seq, tiles, 0))
        everything += tl.sum(tiles)
    position = tl.load(positions + seq)
    length = (position + 1).to(tl.int32)
    block = tl.load(block_tables + seq.to(tl.int64) * table_stride + position // B)
    tl.store(slots + seq, block.to(tl.int64) * B + position % B)
    tl.store(lengths + seq, length)
    if seq == num_seqs - 1:
        tl.store(lengths + num_seqs, 0)  # what a program reads behind its last tile
        tl.store(total, everything)
    tiles = num_tiles(length, WINDOW, BN)
    end = before + tiles * HKV
    num_programs = tl.minimum(num_programs, everything)
    first = (before * num_programs + everything - 1) // everything
    last = (end * num_programs + everything - 1) // everything  # the first that starts behind
    for i in range(first, last, STEP):
        programs = i + tl.arange(0, STEP)
        place = (everything * programs // num_programs - before).to(tl.int32)
        entry = starts + programs * 4
        inside = programs < last
        tl.store(entry, tl.zeros_like(place) + seq, mask=inside)
        tl.store(entry + 1, place // tiles, mask=inside)
        tl.store(entry + 2, place % tiles, mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def attend(
    out,
    q,
    kv,
    block_tables,
    lengths,
    starts,
    total,
    arrivals,
    pieces,
    piece_sums,
    table_stride,
    q_row_stride,
    q_head_stride,
    scale,
    WINDOW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ADDED: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program's even share of the list. ``kv`` is one layer, ``[N, Hkv, 2, B, D]``."""
    program = tl.program_id(0).to(tl.int64)
    everything = tl.load(total)
    num_programs = tl.minimum(tl.num_programs(0), everything)  # those that have tiles
    if program >= num_programs:
        return
    begin = everything * program // num_programs
    end = everything * (program + 1) // num_programs
    first_seq = tl.load(starts + program * 4)
    first_head = tl.load(starts + program * 4 + 1)
    skipped = tl.load(starts + program * 4 + 2)  # tiles of the row that earlier programs have
    seq, head = first_seq, first_head
    length = tl.load(lengths + seq)
    first_length = length
    start = (num_skipped(length, WINDOW, BN) + skipped) * BN
    is_whole = skipped == 0  # the row, as far as it has come
    is_open = is_whole
    columns = tl.arange(0, BN)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, DP), dtype=tl.float32)
    blocks = read_blocks(block_tables, seq, start, length, table_stride, B, BN)
    if OVERLAPS:
        gdc_wait()
    queries = read_queries(
        q,
        seq,
        head,
        length,
        q_row_stride,
        q_head_stride,
        kv.dtype.element_ty,
        GROUP,
        ROWS,
        D,
        DP,
    )
    for _ in range((end - begin).to(tl.int32)):
        seen = are_seen(start + columns, length, WINDOW)
        k, v = read_tile(kv, blocks, head, start, seen, BLOCK_STRIDE, HEAD_STRIDE, B, D, DP, BN)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        if tl.max(new_top - top) > 0:
            shrink = tl.exp2(top - new_top)
            norm = norm * shrink
            mixed = mixed * shrink[:, None]
        norm += tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
        top = new_top
        is_last = start + BN >= length
        next_head = head + is_last.to(tl.int32)
        next_seq = seq + (next_head == HKV).to(tl.int32)
        next_head = tl.where(next_head == HKV, 0, next_head)
        next_length = tl.load(lengths + next_seq)
        if is_last:
            end_row(
                out,
                pieces,
                piece_sums,
                mixed,
                top,
                norm,
                is_whole,
                seq,
                head,
                2 * program,
                HKV,
                GROUP,
                ROWS,
                D,
                DP,
            )
            top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
            norm = tl.zeros((ROWS,), dtype=tl.float32)
            mixed = tl.zeros((ROWS, DP), dtype=tl.float32)
            # Here only: with every tile they would be one thing more to wait for.
            queries = read_queries(
                q,
                next_seq,
                next_head,
                next_length,
                q_row_stride,
                q_head_stride,
                kv.dtype.element_ty,
                GROUP,
                ROWS,
                D,
                DP,
            )
        is_open = start + BN < length
        is_whole = is_whole | is_last
        seq, head, length = next_seq, next_head, next_length
        start = tl.where(is_last, num_skipped(length, WINDOW, BN) * BN, start + BN)
        blocks = read_blocks(block_tables, seq, start, length, table_stride, B, BN)
    if OVERLAPS:
        gdc_launch_dependents()
    if is_open:
        place = 2 * program + is_whole.to(tl.int64)
        write_piece(pieces, piece_sums, place, mixed, top, norm, GROUP, ROWS, DP)
    tl.debug_barrier()  # the pieces are written before this program says so
    if skipped > 0:
        row_begin = begin - skipped
        row_end = row_begin + num_tiles(first_length, WINDOW, BN)
        arrive(
            out,
            arrivals,
            pieces,
            piece_sums,
            first_seq,
            first_head,
            row_begin,
            row_end,
            everything,
            num_programs,
            HKV,
            GROUP,
            D,
            DP,
            ADDED,
        )
    if is_open & is_whole:
        row_begin = end - (start // BN - num_skipped(length, WINDOW, BN))
        row_end = row_begin + num_tiles(length, WINDOW, BN)
        arrive(
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
            HKV,
            GROUP,
            D,
            DP,
            ADDED,
        )
