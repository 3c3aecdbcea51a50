"""Matrix products of few rows on NVIDIA GPUs, as fast as memory gives the weights.

Such a product takes the time of reading its weights once. Libraries read large ones at full speed;
of those of some tens of MB a third of the time is starting and ending a kernel. These kernels are
launched before the kernel before them has ended (programmatic dependent launch, from Hopper on) and
wait for its results only when all is ready. ``F.linear`` is the oracle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.kernels.interface import Kernels
from pdserve.engine.model import triton_kernels

ROWS = (16, 32, 64)  # of x, filled up; the matrix units take no fewer at a time
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
    splits: int = 1  # programs that share the inputs
    most_in: int | None = None  # inputs up to which it pays

    def fits(self, out_size: int, in_size: int) -> bool:
        pays = self.most_in is None or in_size <= self.most_in
        return pays and out_size % self.columns == 0 and in_size % (self.depth * self.splits) == 0

    @property
    def fills_units(self) -> bool:
        """True if the outputs of a program fill the left side of Hopper's matrix units."""
        return self.columns >= UNIT_ROWS


# The first that fits, from this many outputs on. Measured on an H200 in a whole decode step.
FOR_FEW = (
    (16384, Tiling(columns=128, depth=128, stages=3, warps=8)),
    (6144, Tiling(columns=64, depth=256, stages=4, warps=4)),
    (0, Tiling(columns=32, depth=256, stages=6, warps=4)),
    (0, Tiling(columns=64, depth=128, stages=6, warps=4)),
    (0, Tiling(columns=32, depth=64, stages=6, warps=4)),
)
FOR_MORE = (  # the others by the library
    (16384, Tiling(columns=128, depth=128, stages=4, warps=8)),
    (6144, Tiling(columns=64, depth=128, stages=4, warps=4, most_in=2048)),
    (3072, Tiling(columns=64, depth=128, stages=4, warps=4, splits=2)),
)
# Where splitting pays: the outputs alone are too few programs, and the inputs are many.
MOST_SPLIT_OUT = 4096
LEAST_SPLIT_IN = 4096


class Product(Protocol):
    """``[T, in]`` → ``[T, out]``."""

    def __call__(self, x: Tensor) -> Tensor: ...


class SkinnyProduct:
    """``x @ weight.T + bias``: a kernel for one row of x, one for some, the library for others."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, few: Tiling, more: Tiling | None
    ) -> None:
        self._weight = weight  # [out, in]
        self._bias = bias
        self._tilings = (few, more, more)  # for so many ROWS
        num_tiles = weight.shape[0] // min(tiling.columns for tiling in (few, more) if tiling)
        self._arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)
        self._one_depth = _one_row_depth(weight.shape[1])
        for num_rows in (1, *ROWS):  # compiles and loads the kernels, which a request must not
            self(self.zeros(num_rows))

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self._one_row(x)
        found = self._some_rows(x, is_gated=False)
        return F.linear(x, self._weight, self._bias) if found is None else found

    def zeros(self, num_rows: int) -> Tensor:
        """``[num_rows, in]``."""
        return self._weight.new_zeros(num_rows, self._weight.shape[1])

    def gated(self, x: Tensor) -> Tensor | None:
        """SiLU of the first half of the outputs times the second; None: not in one kernel."""
        return None if x.shape[0] == 1 else self._some_rows(x, is_gated=True)

    def _one_row(self, x: Tensor) -> Tensor:
        out = x.new_empty(1, self._weight.shape[0])
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
        return out

    def _some_rows(self, x: Tensor, *, is_gated: bool) -> Tensor | None:
        """None where there is no kernel for so many rows."""
        num_rows = x.shape[0]
        fitting = [number for number, rows in enumerate(ROWS) if num_rows <= rows]
        tiling = self._tilings[fitting[0]] if num_rows and fitting else None
        if tiling is None or (is_gated and not (tiling.fills_units and tiling.splits == 1)):
            return None
        assert x.stride(1) == 1
        rows, splits = ROWS[fitting[0]], tiling.splits
        num_tiles = self._weight.shape[0] // tiling.columns
        pieces = None
        if splits > 1:
            pieces = x.new_empty(splits, self._weight.shape[0], rows, dtype=torch.float32)
        out = x.new_empty(num_rows, self._weight.shape[0] // (2 if is_gated else 1))
        triton_kernels.few_rows_product[(num_tiles, splits)](
            out,
            x,
            self._weight,
            self._bias,
            pieces,
            self._arrivals,
            num_rows,
            out.shape[1],
            x.shape[1],
            x.stride(0),
            HAS_BIAS=self._bias is not None,
            ROWS=rows,
            COLUMNS=tiling.columns,
            DEPTH=tiling.depth,
            SPLITS=splits,
            LEFT=tiling.fills_units,
            GATED=is_gated,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            launch_pdl=True,
        )
        return out


class GatedProduct:
    """``silu(gate) * up``, where the outputs of ``whole`` are both, one below the other."""

    def __init__(self, whole: SkinnyProduct, kernels: Kernels) -> None:
        self._whole = whole
        self._kernels = kernels
        for num_rows in ROWS:  # as above
            self(whole.zeros(num_rows))

    def __call__(self, x: Tensor) -> Tensor:
        found = self._whole.gated(x)
        return self._kernels.silu_mul(self._whole(x)) if found is None else found


def skinny_product(weight: Tensor, bias: Tensor | None) -> SkinnyProduct | None:
    """The product with ``weight`` ``[out, in]``; None where only the library can do it."""
    if weight.dtype not in {torch.bfloat16, torch.float16} or not weight.is_contiguous():
        return None
    if torch.cuda.get_device_capability(weight.device)[0] < HOPPER:
        return None
    out_size, in_size = weight.shape
    depth = _one_row_depth(in_size)
    if depth < LEAST_DEPTH or out_size % (BLOCK // depth):
        return None
    few = _first_that_fits(FOR_FEW, out_size, in_size)
    more = _first_that_fits(FOR_MORE, out_size, in_size)
    return None if few is None else SkinnyProduct(weight, bias, few, more)


def gated_product(whole: Product, kernels: Kernels) -> GatedProduct | None:
    """SiLU of the first half of the outputs of ``whole`` times the second, where it is one of
    ours.
    """
    return GatedProduct(whole, kernels) if isinstance(whole, SkinnyProduct) else None


def _first_that_fits(
    tilings: Sequence[tuple[int, Tiling]], out_size: int, in_size: int
) -> Tiling | None:
    for least, tiling in tilings:
        pays = tiling.splits == 1 or (out_size <= MOST_SPLIT_OUT and in_size >= LEAST_SPLIT_IN)
        if out_size >= least and pays and tiling.fits(out_size, in_size):
            return tiling
    return None


def _one_row_depth(in_size: int) -> int:
    """The largest power of two that divides, up to ``BLOCK``."""
    return min(in_size & -in_size, BLOCK)
