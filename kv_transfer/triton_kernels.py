"""The kernel that copies a list of pieces between two memories that a GPU reaches.

Addresses are numbers, since one of the two may be another process's cache. Everything is in words
of 4 bytes and a multiple of 16 bytes. Each program takes every n-th tile of all pieces.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["target", "source", "count", "size", "target_row", "source_row"])
def copy_pieces(
    target,
    source,
    starts,  # [2, count]: of the pieces at the target, then at the source
    count,
    size,  # words of a piece
    target_row,
    source_row,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """ROW: words of a row; 0 where a whole piece is one run on both sides."""
    into = tl.multiple_of(target, 16).to(tl.pointer_type(tl.int32))
    out_of = tl.multiple_of(source, 16).to(tl.pointer_type(tl.int32))
    tiles = tl.cdiv(size, TILE)
    vector = tl.arange(0, TILE // 4) * 4
    word = tl.arange(0, 4)[None, :]
    for tile in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        piece = tile // tiles
        at = (tile % tiles) * TILE + vector
        there = tl.multiple_of(tl.load(starts + count + piece), 4)
        here = tl.multiple_of(tl.load(starts + piece), 4)
        if ROW == 0:
            read, written = at, at
        else:
            row, column = at // ROW, at % ROW
            read = row * tl.multiple_of(source_row, 4) + column
            written = row * tl.multiple_of(target_row, 4) + column
        inside = (at < size)[:, None]  # whole vectors: loads and stores are 16 bytes wide
        words = tl.load(
            tl.multiple_of((out_of + there + read)[:, None] + word, (1, 16)),
            mask=inside,
            eviction_policy="evict_first",
        )
        tl.store(
            tl.multiple_of((into + here + written)[:, None] + word, (1, 16)), words, mask=inside
        )
