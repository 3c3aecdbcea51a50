"""The race of ``sampling_race.py`` as one Triton kernel: a program draws one row's token.

It reads the logits as they lie, makes the noise as it goes and sorts nothing: whether the winner is
inside ``top_k`` and ``top_p`` is seen by counting what comes before it, as ``settle_top_p`` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from pdserve.core.request import SamplingParams
from pdserve.engine.sampling_race import Lots
from pdserve.engine.staging import sent

BLOCK = 4096
NUM_WARPS = 16


class TritonRace:
    """For logits of any float type on a GPU."""

    def can_draw(self, sampling: SamplingParams) -> bool:
        # Where ``top_p`` counts among the tokens of ``top_k`` only, those would have to be known.
        return sampling.top_k is None or sampling.top_p >= 1

    def draw(self, logits: Tensor, lots: Lots) -> Tensor:
        whole, real = sent(lots.whole, logits.device), sent(lots.real, logits.device)
        num_rows, vocab_size = len(whole), logits.shape[1]
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        _race[(num_rows,)](
            tokens,
            logits,
            whole,
            real,
            logits.stride(0),
            vocab_size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        return tokens


@triton.jit
def noise_of(ids, k0, k1):
    """``noise`` of ``noise.py`` for these token ids."""
    lane = ids.to(tl.uint32) + 0x9E3779B9
    lane = (lane ^ (lane >> 16)) * 0x7FEB352D
    lane = (lane ^ (lane >> 15)) * 0x846CA68B
    lane = lane ^ (lane >> 16)
    bits = (lane ^ k0) * 0x7FEB352D
    bits = ((bits ^ (bits >> 15)) + k1) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    u = tl.minimum(tl.maximum(bits.to(tl.float32), 0.5), 2147483520.0) * (1.0 / 2147483648.0)
    return libdevice.log1p(-u)


@triton.jit
def _load(place, ids, vocab_size):
    return tl.load(place + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _is_before(logits, ids, at, end):
    """Where a token comes before ``end``, of logit ``at``, in the order of the logits."""
    return (logits > at) | ((logits == at) & (ids < end))


@triton.jit
def _peak(place, vocab_size, BLOCK: tl.constexpr):
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab_size, BLOCK):
        peaks = tl.maximum(peaks, _load(place, first + tl.arange(0, BLOCK), vocab_size))
    return tl.max(peaks)


@triton.jit
def _winner(place, at, end, peak, temperature, min_p, k0, k1, vocab_size, BLOCK: tl.constexpr):
    """The race among the tokens before ``end``."""
    scores = tl.full((BLOCK,), 1.0, tl.float32)
    leaders = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = _load(place, ids, vocab_size)
        weights = tl.exp((x - peak) / temperature)
        runs = _is_before(x, ids, at, end) & (weights >= min_p)
        found = tl.where(runs, weights / noise_of(ids, k0, k1), 1.0)
        leaders = tl.where(found < scores, ids, leaders)
        scores = tl.minimum(scores, found)
    return tl.min(tl.where(scores == tl.min(scores), leaders, vocab_size))


@triton.jit
def _before(place, at, end, peak, temperature, vocab_size, BLOCK: tl.constexpr):
    """The weight of the tokens before ``end``, and their number."""
    sums = tl.zeros((BLOCK,), tl.float64)
    counts = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = _load(place, ids, vocab_size)
        is_before = _is_before(x, ids, at, end) & (ids < vocab_size)
        sums += tl.where(is_before, tl.exp((x - peak) / temperature), 0.0).to(tl.float64)
        counts += is_before.to(tl.int32)
    return tl.sum(sums), tl.sum(counts)


@triton.jit
def settled_winner(
    winner,
    place,
    peak,
    temperature,
    top_k,
    top_p,
    min_p,
    k0,
    k1,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The winner inside ``top_k`` and ``top_p``, from the one among all tokens."""
    limit = tl.full((), float("inf"), tl.float64)
    if top_p < 1.0:
        total, _ = _before(place, float("-inf"), vocab_size, peak, temperature, vocab_size, BLOCK)
        limit = total * top_p
    is_open = (top_p < 1.0) | (top_k < vocab_size)
    while is_open:
        at = tl.load(place + winner).to(tl.float32)
        weight, count = _before(place, at, winner, peak, temperature, vocab_size, BLOCK)
        is_open = (count > 0) & ((weight >= limit) | (count >= top_k))
        if is_open:  # what comes behind the winner is outside too
            next_one = _winner(
                place, at, winner, peak, temperature, min_p, k0, k1, vocab_size, BLOCK
            )
            # It is not where no weight is a number, as of infinite logits: then this one stays.
            is_open = _is_before(tl.load(place + next_one).to(tl.float32), next_one, at, winner)
            winner = tl.where(is_open, next_one, winner)
    return winner


@triton.jit
def _race(
    tokens,
    logits,
    whole,
    real,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    place = logits + tl.load(whole + 4 * number).to(tl.int64) * row_stride
    k0 = tl.load(whole + 4 * number + 1).to(tl.uint32, bitcast=True)
    k1 = tl.load(whole + 4 * number + 2).to(tl.uint32, bitcast=True)
    top_k = tl.load(whole + 4 * number + 3)
    temperature = tl.load(real + 3 * number)
    top_p = tl.load(real + 3 * number + 1)
    min_p = tl.load(real + 3 * number + 2)

    peak = _peak(place, vocab_size, BLOCK)
    everything = float("-inf")  # nothing comes behind the last token of the least logit
    winner = _winner(
        place, everything, vocab_size, peak, temperature, min_p, k0, k1, vocab_size, BLOCK
    )
    winner = settled_winner(
        winner,
        place,
        peak,
        temperature,
        top_k,
        top_p,
        min_p,
        k0,
        k1,
        vocab_size,
        BLOCK,
    )
    tl.store(tokens + number, winner.to(tl.int64))
