"""What a model needs between its matrix products, one Protocol for all devices."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where the K and V of T tokens go."""

    pages: Tensor  # one layer of the KV cache, [N, Hkv, 2, B, D]
    cells: Tensor  # [T] int64: B times the token's block, plus its place in there

    def write(self, k: Tensor, v: Tensor) -> None:
        """In plain torch; k and v are ``[T, Hkv, D]``."""
        block_size = self.pages.shape[3]
        blocks, offsets = self.cells // block_size, self.cells % block_size
        self.pages[blocks, :, 0, offsets] = k.to(self.pages.dtype)
        self.pages[blocks, :, 1, offsets] = v.to(self.pages.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms of queries and keys, head by head, before they are rotated."""

    q: Tensor  # [D], as ``Kernels.rms_norm`` takes it
    k: Tensor  # [D]
    eps: float


class Kernels(Protocol):
    """Small fused operations on T rows; only the last dimension must be contiguous."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / rms(x) * weight`` over the last dimension; ``x`` is ``[T, n]`` or ``[T, H, n]``."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x``, in place; returns the norm of the sum. Both ``[T, n]``."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2n]`` → ``[T, n]``: SiLU of the first half times the second."""

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, norms: HeadNorms | None
    ) -> None:
        """Rotary embedding of q ``[T, Hq, D]`` and k ``[T, Hkv, D]`` in place, after ``norms``.

        ``positions`` ``[T]`` int64 are rows of ``table`` ``[P, D]`` float32: D/2 cosines, then D/2
        sines. Element i turns with element i + D/2.
        """

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        norms: HeadNorms | None,
        to: Destination,
    ) -> None:
        """As ``rotate``; then k and v ``[T, Hkv, D]`` are written to their pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A layer's rotary embedding: its angles, what comes before, and the operations for both."""

    kernels: Kernels
    table: Tensor  # [P, D], as ``Kernels.rotate`` takes it
    norms: HeadNorms | None = None

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> None:
        """Norm and rotate q and k in place."""
        self.kernels.rotate(q, k, positions, self.table, self.norms)

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, to: Destination
    ) -> None:
        """Norm and rotate q and k in place, and write k and v."""
        self.kernels.rotate_and_write(q, k, v, positions, self.table, self.norms, to)
