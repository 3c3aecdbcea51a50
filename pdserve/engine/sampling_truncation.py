"""Which tokens may be sampled: ``top_k``, ``top_p`` and ``min_p`` over one order of the tokens.

The order is: logit descending, token id ascending. ``top_k`` keeps its first k tokens; ``top_p``
keeps a token while the probability of those before it, among what ``top_k`` left, is less than p;
``min_p`` keeps tokens of at least min_p times the largest probability. Each keeps a prefix of the
order, one token at least. Weights are ``exp((logit - largest logit) / temperature)``, 1 at
the peak, not normalised. A mask is 1.0 where a token is kept, else 0.0 (far quicker than
booleans on a CPU).

Sorting a vocabulary costs a CPU milliseconds a row, so ``settle_top_p`` does without: it runs the
race over all tokens and looks whether the winner is in the prefix.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def top_k_mask(logits: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """The mask ``[R, V]`` of each row's first ``top_k`` (int64 ``[R]``, <= ``largest_k``)."""
    last = top_k[:, None] - 1
    threshold = logits.topk(largest_k, dim=1).values.gather(1, last)
    above = _as_float(torch.gt, logits, threshold)
    ties = _as_float(torch.eq, logits, threshold)
    room = top_k[:, None] - above.sum(1, keepdim=True)
    return above.add_(ties.mul_(_as_float(torch.le, ties.cumsum(1), room)))


def min_p_mask(weights: Tensor, min_p: Tensor) -> Tensor:
    """The mask ``[R, V]`` of the weights that are at least ``min_p`` (float32 ``[R]``)."""
    return _as_float(torch.ge, weights, min_p[:, None])


def top_p_limits(weights: Tensor, top_p: Tensor) -> Tensor:
    """What the weights before a kept token must stay under: float64 ``[R]``."""
    return weights.sum(1, dtype=torch.float64) * top_p


def top_p_mask(weights: Tensor, logits: Tensor, limits: Tensor) -> Tensor:
    """The mask ``[R, V]`` of what top_p keeps, by a full sort; ``limits`` are ``top_p_limits``.

    The plain twin of ``settle_top_p``, and what devices use where a sort is cheaper than a sync.
    """
    order = logits.argsort(dim=1, descending=True, stable=True)
    ordered = weights.gather(1, order)
    before = ordered.cumsum(1, dtype=torch.float64) - ordered
    kept = (before < limits[:, None]).to(weights.dtype)
    return torch.zeros_like(weights).scatter_(1, order, kept)


def settle_top_p(
    scores: Tensor, weights: Tensor, logits: Tensor, limits: Tensor, tokens: Tensor
) -> None:
    """Put the winners inside top_p into ``tokens`` ``[R]``, which holds those over all tokens.

    ``scores`` are negative, least is best; ``limits`` are ``top_p_limits``. A winner outside shows
    that all behind it are outside too, so the race is run again among the tokens before it. Most
    rows need one round, and a round leaves about half of the mass. Changes ``scores``.
    """
    ids = torch.arange(logits.shape[1], dtype=torch.float32, device=logits.device)
    alone = _indices(limits <= 1)  # the peak, of weight 1, is all that fits: no rounds
    tokens[alone] = logits.index_select(0, alone).argmax(1)
    rows = again = _indices(limits > 1)
    while True:
        if len(again) < len(limits):
            scores, weights, logits, limits = (
                tensor.index_select(0, again) for tensor in (scores, weights, logits, limits)
            )
        before = _before_mask(logits, tokens[rows], ids)
        again = _indices((weights * before).sum(1, dtype=torch.float64) >= limits)
        if not again.numel():
            return
        scores.mul_(before)
        rows = rows[again]
        tokens[rows] = scores.index_select(0, again).argmin(1)


def _before_mask(logits: Tensor, tokens: Tensor, ids: Tensor) -> Tensor:
    """The mask of what comes before the row's ``tokens`` ``[R]`` in the order of its ``logits``."""
    at = logits.gather(1, tokens[:, None])
    ties = _as_float(torch.eq, logits, at)
    ties.mul_(_as_float(torch.lt, ids.expand_as(logits), tokens[:, None].to(ids.dtype)))
    return _as_float(torch.gt, logits, at).add_(ties)


def _as_float(compare: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
    return compare(left, right, out=torch.empty_like(left, dtype=torch.float32))


def _indices(selected: Tensor) -> Tensor:
    return selected.nonzero().squeeze(1)  # sync: how many there are decides what is done
