"""Matrix products cut over the ranks of a group: by output rows, or by input columns and summed.

All communication of a model's layers is here and in ``embedding.py``. A matrix product runs on what
the device does best: weights packed for oneDNN on CPU; on a GPU kernels of our own for few rows,
where Triton is, and ``F.linear`` for the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.plugin import load_plugin
from pdserve.engine.kernels.interface import Kernels
from pdserve.engine.model.shard import Shard

Product = Callable[[Tensor], Tensor]  # [T, in] → [T, out]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """The ``rows`` that this rank takes of a projection with ``out_size`` rows."""

    name: str
    out_size: int
    rows: range


class ColumnLinear:
    """Each rank computes some outputs of one or more projections of the same input."""

    def __init__(self, shard: Shard, parts: Sequence[RowsOf], *, in_size: int, bias: bool) -> None:
        self._product = product(*_joined(shard, parts, in_size=in_size, bias=bias))

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


class GatedLinear:
    """``silu(gate(x)) * up(x)``: each rank computes some of it."""

    def __init__(self, shard: Shard, gate: RowsOf, up: RowsOf, *, in_size: int, bias: bool) -> None:
        weight, offset = _joined(shard, (gate, up), in_size=in_size, bias=bias)
        self._product = gated_product(weight, offset, shard.kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


class QkvLinear:
    """Attention's three projections: this rank's query heads and the KV heads that they read."""

    def __init__(self, shard: Shard, name: str, *, bias: bool) -> None:
        spec, heads = shard.spec, shard.heads
        size = spec.head_size
        kv_rows = range(shard.kv_heads.start * size, shard.kv_heads.stop * size)
        q_size, kv_size = spec.num_heads * size, spec.num_kv_heads * size
        parts = (
            RowsOf(name=f"{name}.q_proj", out_size=q_size, rows=shard.even_part(q_size)),
            RowsOf(name=f"{name}.k_proj", out_size=kv_size, rows=kv_rows),
            RowsOf(name=f"{name}.v_proj", out_size=kv_size, rows=kv_rows),
        )
        self._linear = ColumnLinear(shard, parts, in_size=spec.hidden_size, bias=bias)
        self._counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        self._head_size = size

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[T, Hq, D]``, k and v ``[T, Hkv, D]``: views of one result."""
        qkv = self._linear(x).view(x.shape[0], sum(self._counts), self._head_size)
        q, k, v = torch.split(qkv, self._counts, dim=1)
        return q, k, v


class RowLinear:
    """Each rank holds some input columns; the ranks' products are summed."""

    def __init__(self, shard: Shard, name: str, *, in_size: int, out_size: int, bias: bool) -> None:
        columns = shard.even_part(in_size)
        weight = shard.weights.take(f"{name}.weight", (out_size, in_size), columns=columns)
        offset = shard.weights.take(f"{name}.bias", (out_size,)) if bias else None
        # The bias enters the sum once.
        self._product = product(weight, offset if shard.group.rank == 0 else None)
        self._group = shard.group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._product(x))


def product(weight: Tensor, bias: Tensor | None) -> Product:
    """The matrix product with ``weight`` ``[out, in]``, prepared once."""
    if weight.device.type == "cpu" and _can_pack(weight):
        return _packed(weight, bias)
    skinny = _skinny(weight, bias) if weight.device.type == "cuda" else None
    return skinny if skinny is not None else lambda x: F.linear(x, weight, bias)


def gated_product(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Product:
    """SiLU of the product with the first half of ``weight`` ``[2 * out, in]``, times that with the
    second.
    """
    whole = product(weight, bias)
    in_one = _skinny_gated(whole, kernels) if weight.device.type == "cuda" else None
    return in_one if in_one is not None else lambda x: kernels.silu_mul(whole(x))


def _joined(
    shard: Shard, parts: Sequence[RowsOf], *, in_size: int, bias: bool
) -> tuple[Tensor, Tensor | None]:
    """This rank's weight ``[out, in]`` and bias ``[out]`` of all parts, one below the other."""
    take = shard.weights.take
    weights = [
        take(f"{part.name}.weight", (part.out_size, in_size), rows=part.rows) for part in parts
    ]
    biases = [take(f"{part.name}.bias", (part.out_size,), rows=part.rows) for part in parts if bias]
    return torch.cat(weights), torch.cat(biases) if bias else None


def _skinny(weight: Tensor, bias: Tensor | None) -> Product | None:
    try:
        make = load_plugin("pdserve.engine.model.skinny_product:skinny_product")
    except ImportError:
        return None  # no Triton
    found: Product | None = make(weight, bias)
    return found


def _skinny_gated(whole: Product, kernels: Kernels) -> Product | None:
    try:
        make = load_plugin("pdserve.engine.model.skinny_product:gated_product")
    except ImportError:
        return None  # no Triton
    found: Product | None = make(whole, kernels)
    return found


def _can_pack(weight: Tensor) -> bool:
    has_operators = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    if not (torch._C._has_mkldnn and has_operators):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    linear = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: Tensor) -> Tensor:
        result: Tensor = linear(x, packed, bias, "none", (), "")
        return result

    return apply
