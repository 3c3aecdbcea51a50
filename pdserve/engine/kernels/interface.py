"""What a model needs between its matrix products, one Protocol for all devices."""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    """Small fused operations on T rows; only the last dimension must be contiguous."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / rms(x) * weight`` over the last dimension; ``x`` is ``[T, n]`` or ``[T, H, n]``."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x``, in place; returns the norm of the sum. Both ``[T, n]``."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2n]`` → ``[T, n]``: SiLU of the first half times the second."""

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        """Rotary embedding of q ``[T, Hq, D]`` and k ``[T, Hkv, D]`` in place.

        ``positions`` ``[T]`` int64 are rows of ``table`` ``[P, D]`` float32: D/2 cosines, then D/2
        sines. Element i turns with element i + D/2.
        """
