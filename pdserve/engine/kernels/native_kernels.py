"""The small operations in C; ``torch_kernels.py`` is their oracle and does what C does not."""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.kernels.interface import Destination, HeadNorms
from pdserve.engine.kernels.torch_kernels import TorchKernels
from pdserve.engine.native.library import native_library

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS: dict[str, list[Any]] = {
    "pd_rms_norm": [*[c_void_p] * 3, *[c_int64] * 5, c_float],
    "pd_add_rms_norm": [*[c_void_p] * 4, *[c_int64] * 2, c_float],
    "pd_silu_mul": [*[c_void_p] * 2, *[c_int64] * 2],
    "pd_rotate": [*[c_void_p] * 4, *[c_int64] * 6],
}


class NativeKernels:
    """For float32 and bfloat16 on CPU. Like torch's, all compute in float32 and round once. Other
    types are left to torch.
    """

    def __init__(self) -> None:
        library = native_library()
        if library is None:
            raise ConfigError("kernels: 'native' needs a C compiler; use 'torch'")
        self._rms_norm = _typed(library, "pd_rms_norm")
        self._add_rms_norm = _typed(library, "pd_add_rms_norm")
        self._silu_mul = _typed(library, "pd_silu_mul")
        self._rotate = _typed(library, "pd_rotate")
        self._others = TorchKernels()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _SUFFIXES:
            return self._others.rms_norm(x, weight, eps)
        rows, size = x.shape[0], x.shape[-1]
        heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, size)  # noqa: PLR2004
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm[x.dtype](
            out.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            rows,
            heads,
            x.stride(0),
            head_stride,
            size,
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _SUFFIXES:
            return self._others.add_rms_norm(x, residual, weight, eps)
        assert x.is_contiguous()
        assert residual.is_contiguous()
        out = torch.empty_like(x)
        self._add_rms_norm[x.dtype](
            out.data_ptr(),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            *x.shape,
            eps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in _SUFFIXES:
            return self._others.silu_mul(gate_up)
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        self._silu_mul[gate_up.dtype](out.data_ptr(), gate_up.data_ptr(), rows, size)
        return out

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, norms: HeadNorms | None
    ) -> None:
        if q.dtype not in _SUFFIXES:
            return self._others.rotate(q, k, positions, table, norms)
        if norms is not None:
            q.copy_(self.rms_norm(q, norms.q, norms.eps))
            k.copy_(self.rms_norm(k, norms.k, norms.eps))
        rows, num_heads, size = q.shape
        assert q.stride(1) == k.stride(1) == size
        self._rotate[q.dtype](
            q.data_ptr(),
            k.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            rows,
            num_heads,
            k.shape[1],
            q.stride(0),
            k.stride(0),
            size,
        )

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
        self.rotate(q, k, positions, table, norms)
        to.write(k, v)


def _typed(library: ctypes.CDLL, name: str) -> dict[torch.dtype, Any]:
    """The function's variants by element type."""
    functions = {}
    for dtype, suffix in _SUFFIXES.items():
        function = library[f"{name}_{suffix}"]
        function.argtypes = _ARGUMENTS[name]
        function.restype = None
        functions[dtype] = function
    return functions
