"""Drawing tokens: one exponential race a row among the tokens that its truncation keeps.

The token with the least ``weight / noise`` wins (``noise.py``), which draws each with probability
proportional to its weight. Greedy rows do not come here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.core.plugin import load_plugin
from pdserve.core.request import SamplingParams
from pdserve.engine.noise import noise
from pdserve.engine.sampling_truncation import (
    min_p_mask,
    settle_top_p,
    top_k_mask,
    top_p_limits,
    top_p_mask,
)
from pdserve.engine.staging import on_device

_LEAST_TEMPERATURE = 1e-30  # float32 still divides by it
_FAST_RACE = "pdserve.engine.sampling_race_triton:TritonRace"
NO_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Lots:
    """What a fast race is told of its R rows, in host memory. Temperatures are > 0."""

    whole: Tensor  # [R, 4] int32: row of the logits, ``row_key``'s two, top_k
    real: Tensor  # [R, 3] float32: temperature, top_p, min_p

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        keys: Sequence[tuple[int, int]],
        sampling: Sequence[SamplingParams],
    ) -> "Lots":
        """Those of these ``rows`` of the logits."""
        whole = [(row, *key, top_k_of(p)) for row, key, p in zip(rows, keys, sampling, strict=True)]
        return cls(
            torch.tensor(whole, dtype=torch.int32),
            torch.tensor([reals_of(p) for p in sampling], dtype=torch.float32),
        )


def top_k_of(sampling: SamplingParams) -> int:
    """As in ``Lots.whole``."""
    return NO_TOP_K if sampling.top_k is None else sampling.top_k


def reals_of(sampling: SamplingParams) -> tuple[float, float, float]:
    """As in ``Lots.real``."""
    return least_temperature(sampling), sampling.top_p, sampling.min_p


class FastRace(Protocol):
    """``draw`` as one kernel, which reads the logits where they lie."""

    def can_draw(self, sampling: SamplingParams) -> bool:
        """False for what only ``draw`` knows."""

    def draw(self, logits: Tensor, lots: Lots) -> Tensor:
        """One token for each lot, from its row of ``logits`` (any float type ``[L, V]``): int64
        ``[R]``.
        """


def fast_race(device: torch.device) -> FastRace | None:
    """The one for this device, if there is one and its package is installed."""
    if device.type != "cuda":
        return None
    try:
        race: FastRace = load_plugin(_FAST_RACE)()
    except ImportError:
        return None
    return race


def draw(logits: Tensor, keys: Tensor, lanes: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """One token for each row of ``logits`` (float32 ``[R, V]``): int64 ``[R]``.

    ``keys`` (int32 ``[R, 2]``) and ``lanes`` (int32 ``[V]``) make the noise; temperatures are > 0.
    """
    weights = _weights(logits, sampling)
    _truncate_top_k_(weights, logits, sampling)
    limits = _top_p_limits(weights, sampling)
    on_cpu = logits.device.type == "cpu"
    if limits is not None and not on_cpu:
        weights.mul_(top_p_mask(weights, logits, limits))
    _truncate_min_p_(weights, sampling)
    scores = weights / noise(keys, lanes)
    tokens = scores.argmin(1)
    if limits is not None and on_cpu:
        settle_top_p(scores, weights, logits, limits, tokens)
    return tokens


def least_temperature(sampling: SamplingParams) -> float:
    """The temperature, large enough to divide by."""
    return max(sampling.temperature, _LEAST_TEMPERATURE)


def _weights(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    temperatures = [least_temperature(p) for p in sampling]
    below_peak = logits - logits.amax(1, keepdim=True)
    return below_peak.div_(_column(temperatures, torch.float32, logits)[:, None]).exp_()


def _truncate_top_k_(weights: Tensor, logits: Tensor, sampling: Sequence[SamplingParams]) -> None:
    limited = {
        row: p.top_k
        for row, p in enumerate(sampling)
        if p.top_k is not None and p.top_k < logits.shape[1]
    }
    if limited:
        rows = _column(list(limited), torch.int64, logits)
        top_k = _column(list(limited.values()), torch.int64, logits)
        weights[rows] *= top_k_mask(logits[rows], top_k, max(limited.values()))


def _top_p_limits(weights: Tensor, sampling: Sequence[SamplingParams]) -> Tensor | None:
    top_p = [p.top_p if p.top_p < 1.0 else torch.inf for p in sampling]
    if min(top_p) == torch.inf:
        return None
    return top_p_limits(weights, _column(top_p, torch.float64, weights))


def _truncate_min_p_(weights: Tensor, sampling: Sequence[SamplingParams]) -> None:
    min_p = [p.min_p for p in sampling]
    if any(min_p):
        weights.mul_(min_p_mask(weights, _column(min_p, torch.float32, weights)))


def _column(values: Sequence[int] | Sequence[float], dtype: torch.dtype, like: Tensor) -> Tensor:
    return on_device(values, dtype, like.device)
