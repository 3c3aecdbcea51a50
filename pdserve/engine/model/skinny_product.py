"""Matrix products of few rows on NVIDIA GPUs, as fast as memory gives the weights.

Such a product takes the time of reading its weights once. Libraries read large ones at full speed;
of those of some tens of MB a third of the time is starting and ending a kernel. These kernels are
launched before the kernel before them has ended (programmatic dependent launch, from Hopper on) and
wait for its results only when all is ready. ``F.linear`` is the oracle.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.model import triton_kernels

MOST_ROWS = 16  # of x; the matrix units take no fewer at a time
UNIT_ROWS = 64  # of the left side of Hopper's matrix units
ROW_WARPS = 4
BLOCK = 2048  # weights that a program of one row holds at a time
LEAST_DEPTH = 64
HOPPER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A program computes ``columns`` outputs and goes through the inputs ``depth`` at a time."""

    columns: int
    depth: int
    stages: int  # blocks of weights in use or on their way
    warps: int

    def fits(self, out_size: int, in_size: int) -> bool:
        return out_size % self.columns == 0 and in_size % self.depth == 0


# The first that fits, from this many outputs on. Measured on an H200 in a whole decode step.
TILINGS = (
    (16384, Tiling(columns=128, depth=128, stages=4, warps=8)),
    (6144, Tiling(columns=64, depth=256, stages=4, warps=4)),
    (0, Tiling(columns=32, depth=256, stages=6, warps=4)),
    (0, Tiling(columns=64, depth=128, stages=6, warps=4)),
    (0, Tiling(columns=32, depth=64, stages=6, warps=4)),
)


class Product(Protocol):
    """``[T, in]`` → ``[T, out]``."""

    def __call__(self, x: Tensor) -> Tensor: ...


class SkinnyProduct:
    """``x @ weight.T + bias``: a kernel for one row of x, one for few, the library for others."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias
        self._few = tiling
        self._one_depth = _one_row_depth(weight.shape[1])
        for num_rows in (1, 2):  # compiles and loads the kernels, which a request must not
            self(weight.new_zeros(num_rows, weight.shape[1]))

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if not 0 < num_rows <= MOST_ROWS:
            return F.linear(x, self._weight, self._bias)
        assert x.stride(1) == 1
        out = x.new_empty(num_rows, self._weight.shape[0])
        if num_rows == 1:
            self._one_row(out, x)
        else:
            self._few_rows(out, x)
        return out

    def _one_row(self, out: Tensor, x: Tensor) -> None:
        columns = BLOCK // self._one_depth
        triton_kernels.one_row_product[(out.shape[1] // columns,)](
            out,
            x,
            self._weight,
            self._bias,
            x.shape[1],
            HAS_BIAS=self._bias is not None,
            COLUMNS=columns,
            DEPTH=self._one_depth,
            num_warps=ROW_WARPS,
            launch_pdl=True,
        )

    def _few_rows(self, out: Tensor, x: Tensor) -> None:
        tiling = self._few
        triton_kernels.few_rows_product[(out.shape[1] // tiling.columns,)](
            out,
            x,
            self._weight,
            self._bias,
            x.shape[0],
            out.shape[1],
            x.shape[1],
            x.stride(0),
            HAS_BIAS=self._bias is not None,
            ROWS=MOST_ROWS,
            COLUMNS=tiling.columns,
            DEPTH=tiling.depth,
            LEFT=tiling.columns >= UNIT_ROWS,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            launch_pdl=True,
        )


def skinny_product(weight: Tensor, bias: Tensor | None) -> Product | None:
    """The product with ``weight`` ``[out, in]``; None where only the library can do it."""
    if weight.dtype not in {torch.bfloat16, torch.float16} or not weight.is_contiguous():
        return None
    if torch.cuda.get_device_capability(weight.device)[0] < HOPPER:
        return None
    out_size, in_size = weight.shape
    depth = _one_row_depth(in_size)
    if depth < LEAST_DEPTH or out_size % (BLOCK // depth):
        return None
    for least, tiling in TILINGS:
        if out_size >= least and tiling.fits(out_size, in_size):
            return SkinnyProduct(weight, bias, tiling)
    return None


def _one_row_depth(in_size: int) -> int:
    """The largest power of two that divides, up to ``BLOCK``."""
    return min(in_size & -in_size, BLOCK)
