"""Attention on CPU in C, over the pages as they lie; ``sdpa.py`` is its oracle.

Here a step is planned: which chunks are short, where each token's K and V go, how much memory the
threads need. The work itself is in ``native/attention.c``.
"""

import operator
from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.interface import AttentionMetadata, HeadShape
from pdserve.engine.kernels.interface import Rope
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.native.library import native_library

HEAD_SIZE_MULTIPLE = 16  # what the C code's vectors need
DTYPES = (torch.float32, torch.bfloat16)
NO_WINDOW = 1 << 40
ALONE_UP_TO = 4096  # products of a query and a key; waking threads for fewer takes longer


class _Plan(Structure):
    """``struct plan`` of ``native/attention_plan.h``, field by field."""

    _fields_ = (
        ("kv", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("layer_stride", c_int64),
        ("block_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("window", c_int64),
        ("kv_is_bf16", c_int64),
        ("x_is_bf16", c_int64),
        ("num_tokens", c_int64),
        ("num_chunks", c_int64),
        ("num_short", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("first_tokens", c_void_p),
        ("table_rows", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("pages", c_void_p),
        ("context", c_void_p),
        ("workspace", c_void_p),
        ("num_threads", c_int64),
        ("scale", c_float),
    )


class _Rows(Structure):
    """``struct rows`` of ``native/attention_plan.h``."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
    )


class CpuPagedAttention:
    """Float32 and bfloat16, for the model and for the cache in any combination; a float16 model is
    widened.
    """

    def __init__(self, kv: KvCache, heads: HeadShape) -> None:
        library = native_library()
        if library is None:
            raise ConfigError("attention_backend: 'cpu_paged' needs a C compiler; use 'sdpa'")
        if kv.dtype not in DTYPES or heads.head_size % HEAD_SIZE_MULTIPLE:
            raise ConfigError(
                f"attention_backend: 'cpu_paged' takes float32 or bfloat16 and head sizes that "
                f"divide by {HEAD_SIZE_MULTIPLE}, not {kv.dtype} and {heads.head_size}; use 'sdpa'"
            )
        self._attend = library.pd_attend
        self._attend.argtypes = [POINTER(_Plan), POINTER(_Rows), c_int64]
        self._attend.restype = None
        self._workspace_floats = _sized(library.pd_workspace_floats, [POINTER(_Plan)])
        self._context_floats = _sized(library.pd_context_floats, [POINTER(_Plan), c_int64])
        self._is_short = _sized(library.pd_is_short, [POINTER(_Plan), c_int64])
        self._kv = kv
        self._plan = _fixed_part(kv, heads)
        self._held: tuple[Tensor, ...] = ()  # what the plan points to
        self._positions = torch.empty(0, dtype=torch.int64)  # [T]
        self._workspace = torch.empty(0)
        self._context = torch.empty(0)

    def plan(self, metadata: AttentionMetadata) -> None:
        plan = self._plan
        firsts = [0]
        for length in metadata.lengths:
            firsts.append(firsts[-1] + length)
        short = [bool(self._is_short(plan, length)) for length in metadata.lengths]
        order = sorted(range(len(short)), key=lambda chunk: not short[chunk])
        tables, self._positions = metadata.block_tables, metadata.positions
        self._held = (
            _int64(metadata.starts[chunk] for chunk in order),
            _int64(metadata.lengths[chunk] for chunk in order),
            _int64(firsts[chunk] for chunk in order),
            _int64(order),
            tables,
            self._pages(metadata),
        )
        starts, lengths, first_tokens, rows, _, pages = (held.data_ptr() for held in self._held)
        plan.num_tokens, plan.num_chunks, plan.num_short = firsts[-1], len(order), sum(short)
        plan.starts, plan.lengths, plan.first_tokens = starts, lengths, first_tokens
        plan.table_rows, plan.tables, plan.table_stride = rows, tables.data_ptr(), tables.stride(0)
        plan.pages = pages
        ends = [start + n for start, n in zip(metadata.starts, metadata.lengths, strict=True)]
        work = plan.num_heads * sum(map(operator.mul, ends, metadata.lengths))
        plan.num_threads = torch.get_num_threads() if work > ALONE_UP_TO else 1
        self._reserve([ends[chunk] for chunk in order[plan.num_short :]])

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        rope.rotate(q, k, self._positions)
        if q.dtype not in DTYPES:
            return self._write_and_attend(layer, q.float(), k.float(), v.float()).to(q.dtype)
        return self._write_and_attend(layer, q, k, v)

    def _write_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.stride(1) == k.stride(1) == v.stride(1) == q.shape[2]
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        self._plan.x_is_bf16 = q.dtype is torch.bfloat16
        rows = _Rows(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
        )
        self._attend(byref(self._plan), byref(rows), layer)
        return out

    def _pages(self, metadata: AttentionMetadata) -> Tensor:
        """``[T]`` int64: where each token's K of head 0, layer 0 lies in the cache."""
        block_size = self._kv.layout.block_size
        lengths = torch.tensor(metadata.lengths)
        owners = torch.repeat_interleave(lengths)
        places = metadata.positions
        blocks = metadata.block_tables[owners, places // block_size].long()
        offsets = places % block_size * self._kv.layout.head_size
        return blocks * self._kv.tensor.stride(0) + offsets

    def _reserve(self, ends: list[int]) -> None:
        """Memory for this step's threads, and for the longest context of its long chunks."""
        plan = self._plan
        workspace = plan.num_threads * self._workspace_floats(plan)
        if self._workspace.numel() < workspace:
            self._workspace = torch.empty(workspace)
        context = self._context_floats(plan, max(ends)) if ends else 0
        if self._context.numel() < context:
            self._context = torch.empty(context)
        plan.workspace, plan.context = self._workspace.data_ptr(), self._context.data_ptr()


def _fixed_part(kv: KvCache, heads: HeadShape) -> _Plan:
    """What is the same in every step."""
    strides = kv.tensor.stride()
    return _Plan(
        kv=kv.tensor.data_ptr(),
        block_stride=strides[0],
        head_stride=strides[1],
        layer_stride=strides[2],
        block_size=kv.layout.block_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        window=heads.sliding_window or NO_WINDOW,
        kv_is_bf16=kv.dtype is torch.bfloat16,
        scale=heads.scale,
    )


def _sized(function: Any, argtypes: list[Any]) -> Any:  # noqa: ANN401
    """A C function that answers with a number."""
    function.argtypes = argtypes
    function.restype = c_int64
    return function


def _int64(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
