"""How every captured step ends: the likeliest token of each row of logits, and the rows kept."""

from typing import Protocol

import torch
from torch import Tensor

from pdserve.core.plugin import load_plugin

_FAST = "pdserve.engine.likeliest_triton:keep_likeliest"


class KeepLikeliest(Protocol):
    """One pass over the logits."""

    def __call__(self, logits: Tensor, kept: Tensor, tokens: Tensor) -> None:
        """Copy ``logits`` ``[R, V]`` to ``kept``; of each row the id of the largest, the least id
        where there are several, into ``tokens`` (int64 ``[R]``).
        """


def keep_likeliest_plainly(logits: Tensor, kept: Tensor, tokens: Tensor) -> None:
    """In plain torch."""
    kept.copy_(logits)
    tokens.copy_(logits.argmax(1))


def likeliest_on(device: torch.device) -> KeepLikeliest:
    """The fastest for this device."""
    if device.type != "cuda":
        return keep_likeliest_plainly
    try:
        fast: KeepLikeliest = load_plugin(_FAST)
    except ImportError:
        return keep_likeliest_plainly
    return fast
