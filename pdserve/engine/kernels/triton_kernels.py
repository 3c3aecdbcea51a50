"""The small operations on NVIDIA GPUs, one Triton kernel each; ``torch_kernels.py`` is the oracle.

A program works on one row (of one head, where there are heads). Like torch's, all compute in
float32 and round once. Row numbers are int64 before they are multiplied.

From Hopper on a kernel is launched before the one before it has ended, and lets the next be
launched (programmatic dependent launch): it waits before it touches anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.engine.kernels.interface import Destination, HeadNorms

HOPPER = 9
SILU_BLOCK = 1024
ROPE_HEADS = 8  # heads of one token that a program rotates
ROPE_WARPS = 2


class TritonKernels:
    """For any float type on a GPU."""

    def __init__(self) -> None:
        self._overlaps = torch.cuda.get_device_capability()[0] >= HOPPER

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)  # noqa: PLR2004
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rms_norm[(x.shape[0] * num_heads,)](
            out,
            x,
            weight,
            num_heads,
            x.stride(0),
            head_stride,
            size,
            eps,
            BLOCK=triton.next_power_of_2(size),
            OVERLAPS=self._overlaps,
            num_warps=_num_warps(size),
            launch_pdl=self._overlaps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, size = x.shape
        out = torch.empty_like(x)
        _add_rms_norm[(num_rows,)](
            out,
            x,
            residual,
            weight,
            x.stride(0),
            residual.stride(0),
            size,
            eps,
            BLOCK=triton.next_power_of_2(size),
            OVERLAPS=self._overlaps,
            num_warps=_num_warps(size),
            launch_pdl=self._overlaps,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
        grid = (num_rows, triton.cdiv(size, SILU_BLOCK))
        _silu_mul[grid](
            out,
            gate_up,
            gate_up.stride(0),
            size,
            BLOCK=SILU_BLOCK,
            OVERLAPS=self._overlaps,
            launch_pdl=self._overlaps,
        )
        return out

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, norms: HeadNorms | None
    ) -> None:
        self._rotate(q, k, None, positions, table, norms, None)

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
        assert len(to.cells) == len(k)  # a kernel does not look
        self._rotate(q, k, v, positions, table, norms, to)

    def _rotate(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        positions: Tensor,
        table: Tensor,
        norms: HeadNorms | None,
        to: Destination | None,
    ) -> None:
        num_tokens, num_q_heads, size = q.shape
        assert len(positions) == num_tokens
        num_kv_heads = k.shape[1]
        num_programs = triton.cdiv(num_q_heads, ROPE_HEADS) + triton.cdiv(num_kv_heads, ROPE_HEADS)
        _rotate[(num_tokens, num_programs)](
            q,
            k,
            v,
            positions,
            table,
            None if to is None else to.pages,
            None if to is None else to.cells,
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            0.0 if norms is None else norms.eps,
            *(stride for x in (q, k, k if v is None else v) for stride in x.stride()[:2]),
            BLOCK_STRIDE=0 if to is None else to.pages.stride(0),
            HEAD_STRIDE=0 if to is None else to.pages.stride(1),
            B=1 if to is None else to.pages.shape[3],
            HQ=num_q_heads,
            HKV=num_kv_heads,
            HALF=size // 2,
            HEADS=ROPE_HEADS,
            BLOCK=triton.next_power_of_2(size // 2),
            NORMS=norms is not None,
            WRITES=to is not None,
            OVERLAPS=self._overlaps,
            num_warps=ROPE_WARPS,
            launch_pdl=self._overlaps,
        )


def _num_warps(size: int) -> int:
    return min(max(int(triton.next_power_of_2(size)) // 512, 1), 16)


@triton.jit
def _begin(OVERLAPS: tl.constexpr):
    """Lets the next kernel be launched, and waits until the one before is done."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _rms_norm(
    out,
    x,
    weight,
    num_heads,
    row_stride,
    head_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    _begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    start = row // num_heads * row_stride + row % num_heads * head_stride
    wide = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, wide * scale * factor, mask=inside)


@triton.jit
def _add_rms_norm(
    out,
    x,
    residual,
    weight,
    x_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    _begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x_row = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    place = residual + row * residual_stride + columns
    total = (x_row + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(
        residual.dtype.element_ty
    )
    tl.store(place, total, mask=inside)
    wide = total.to(tl.float32)  # of the rounded sum, as the next layers see it
    scale = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, wide * scale * factor, mask=inside)


@triton.jit
def _silu_mul(
    out,
    gate_up,
    row_stride,
    size,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    _begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    place = gate_up + row * row_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotate(
    q,
    k,
    v,
    positions,
    table,
    pages,
    cells,
    q_weight,
    k_weight,
    eps,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    B: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    WRITES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some query heads of a token, or some KV heads of it. ``pages`` is ``[N, Hkv, 2, B, D]``."""
    _begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_q_groups: tl.constexpr = (HQ + HEADS - 1) // HEADS
    pairs = tl.arange(0, BLOCK)[None, :]
    heads = tl.arange(0, HEADS)[:, None]
    angles = table + tl.load(positions + token) * (2 * HALF) + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    if group < num_q_groups:
        heads += group * HEADS
        inside = (heads < HQ) & (pairs < HALF)
        place = q + token * q_row_stride + heads * q_head_stride + pairs
        left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            left, right = _norm_halves(left, right, q_weight, eps, q.dtype.element_ty, HALF, BLOCK)
        tl.store(place, left * cos - right * sin, mask=inside)
        tl.store(place + HALF, right * cos + left * sin, mask=inside)
    else:
        heads += (group - num_q_groups) * HEADS
        inside = (heads < HKV) & (pairs < HALF)
        if WRITES:
            cell = tl.load(cells + token)
        place = k + token * k_row_stride + heads * k_head_stride + pairs
        left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            left, right = _norm_halves(left, right, k_weight, eps, k.dtype.element_ty, HALF, BLOCK)
        new_left = (left * cos - right * sin).to(k.dtype.element_ty)
        new_right = (right * cos + left * sin).to(k.dtype.element_ty)
        tl.store(place, new_left, mask=inside)
        tl.store(place + HALF, new_right, mask=inside)
        if WRITES:
            page = pages + cell // B * BLOCK_STRIDE + cell % B * (2 * HALF)
            page_row = page + heads * HEAD_STRIDE + pairs
            tl.store(page_row, new_left.to(pages.dtype.element_ty), mask=inside)
            tl.store(page_row + HALF, new_right.to(pages.dtype.element_ty), mask=inside)
            v_row = v + token * v_row_stride + heads * v_head_stride + pairs
            v_left = tl.load(v_row, mask=inside, other=0.0)
            v_right = tl.load(v_row + HALF, mask=inside, other=0.0)
            v_page_row = page_row + B * 2 * HALF
            tl.store(v_page_row, v_left.to(pages.dtype.element_ty), mask=inside)
            tl.store(v_page_row + HALF, v_right.to(pages.dtype.element_ty), mask=inside)


@triton.jit
def _norm_halves(
    left, right, weight, eps, dtype: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """The norms of rows in two halves ``[HEADS, BLOCK]``, rounded as ``_rms_norm`` rounds."""
    pairs = tl.arange(0, BLOCK)
    left_factor = tl.load(weight + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    right_factor = tl.load(weight + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    left = (left * scale * left_factor[None, :]).to(dtype).to(tl.float32)
    right = (right * scale * right_factor[None, :]).to(dtype).to(tl.float32)
    return left, right
