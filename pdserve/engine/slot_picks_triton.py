"""``slot_picks.py`` in Triton: a program for each part of a row finds its largest logit, one more
its best of the race where the row's slot draws, and one for each row what the parts found.

Each draw is that of ``sampling_race_triton.py``, token for token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.sampling_race_triton import BLOCK as SETTLED_BLOCK
from pdserve.engine.sampling_race_triton import NUM_WARPS as SETTLING_WARPS
from pdserve.engine.sampling_race_triton import noise_of, settled_winner

BLOCK = 8192  # of a part


def pick(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    tokens: Tensor,
    kept: Tensor | None,
) -> None:
    """As ``Pick``; rows of ``logits`` and of ``kept`` may be strided."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, BLOCK)
    most_parts = triton.next_power_of_2(num_parts)
    # Each by itself: Triton compiles once more for what begins on another border.
    largest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    likeliest = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    scores, leaders = torch.empty_like(largest), torch.empty_like(likeliest)
    _parts[(num_rows, num_parts)](
        logits,
        logits if kept is None else kept,
        largest,
        likeliest,
        logits.stride(0),
        0 if kept is None else kept.stride(0),
        vocab_size,
        KEEPS=kept is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    _races[(num_rows, num_parts)](
        logits,
        slots,
        positions,
        table,
        largest,
        scores,
        leaders,
        logits.stride(0),
        vocab_size,
        WORDS=table.stride(0),
        PARTS=most_parts,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _rows[(num_rows,)](
        logits,
        slots,
        positions,
        table,
        largest,
        likeliest,
        scores,
        leaders,
        tokens,
        logits.stride(0),
        num_parts,
        vocab_size,
        WORDS=table.stride(0),
        PARTS=most_parts,
        BLOCK=SETTLED_BLOCK,
        num_warps=SETTLING_WARPS,
    )


@triton.jit
def _parts(
    logits,
    kept,
    largest,
    likeliest,
    stride,
    kept_stride,
    vocab_size,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    values = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
    if KEEPS:
        tl.store(kept + row * kept_stride + columns, values, mask=inside)
    wide = values.to(tl.float32)
    most = tl.max(wide)
    place = row * tl.num_programs(1) + part
    tl.store(largest + place, most)
    tl.store(likeliest + place, tl.min(tl.where(wide == most, columns, vocab_size - 1)))


@triton.jit
def _real(line, number: tl.constexpr):
    return tl.load(line + number).to(tl.float32, bitcast=True)


@triton.jit
def _mix(z):
    """``mix64`` of ``noise.py``."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _key(line, position):
    """``key`` of ``noise.py``: both halves."""
    low = tl.load(line).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(line + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix((low | (high << 32)) + golden * (position + 1).to(tl.uint64))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _largest(largest, row, num_parts, PARTS: tl.constexpr):
    """What each part of the row found, and the largest of it."""
    parts = tl.arange(0, PARTS)
    place = largest + row * num_parts + parts
    found = tl.load(place, mask=parts < num_parts, other=float("-inf"))
    return found, tl.max(found)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _races(
    logits,
    slots,
    positions,
    table,
    largest,
    scores,
    leaders,
    stride,
    vocab_size,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    line = table + tl.load(slots + row) * WORDS
    temperature = _real(line, 3)
    if temperature > 0:
        _, peak = _largest(largest, row, num_parts, PARTS)
        k0, k1 = _key(line, tl.load(positions + row))
        columns = part * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab_size
        x = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
        weights = tl.exp((x.to(tl.float32) - peak) / temperature)
        runs = inside & (weights >= _real(line, 5))
        found = tl.where(runs, weights / noise_of(columns, k0, k1), 1.0)
        best = tl.min(found)
        tl.store(scores + row * num_parts + part, best)
        leader = tl.min(tl.where(found == best, columns, vocab_size - 1))
        tl.store(leaders + row * num_parts + part, leader)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rows(
    logits,
    slots,
    positions,
    table,
    largest,
    likeliest,
    scores,
    leaders,
    tokens,
    stride,
    num_parts,
    vocab_size,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    line = table + tl.load(slots + row) * WORDS
    found, peak = _largest(largest, row, num_parts, PARTS)
    temperature = _real(line, 3)
    if temperature > 0:
        best = tl.load(scores + row * num_parts + parts, mask=inside, other=float("inf"))
        leader = tl.load(leaders + row * num_parts + parts, mask=inside, other=vocab_size - 1)
        winner = tl.min(tl.where(best == tl.min(best), leader, vocab_size - 1))
        k0, k1 = _key(line, tl.load(positions + row))
        token = settled_winner(
            winner,
            logits + row * stride,
            peak,
            temperature,
            tl.load(line + 2),
            _real(line, 4),
            _real(line, 5),
            k0,
            k1,
            vocab_size,
            BLOCK,
        )
    else:
        first = tl.load(likeliest + row * num_parts + parts, mask=inside, other=0)
        is_best = (found == peak) & inside
        token = tl.min(tl.where(is_best, first, vocab_size - 1))
    tl.store(tokens + row, token.to(tl.int64))
