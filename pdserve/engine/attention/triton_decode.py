"""Decode attention on NVIDIA GPUs in Triton, the KV read once and by all processors alike;
``sdpa.py`` is its oracle.

For steps of one token of each sequence. How the work is shared is decided on the device from the
sequences' lengths, so that one captured graph serves any; ``triton_kernels.py`` says how.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.engine.attention import triton_kernels
from pdserve.engine.attention.interface import AttentionMetadata, HeadShape
from pdserve.engine.kernels.interface import Destination, Rope
from pdserve.engine.kv_cache import KvCache

HOPPER = 9
NO_WINDOW = 0
MOST_POSITIONS = 128  # of a tile
MOST_HEAD_SIZE = 256
LEAST_ROWS = 16  # of a matrix product


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a processor reads. Its four parts should have equally many warps."""

    programs: int  # some compute while others read
    tile_bytes: int  # of K, and as many of V
    stages: int  # tiles in use or on their way
    warps: int
    added: int  # values of pieces that a program adds up at a time


# Measured on an H200 with 2, 4 and 8 queries a KV head. Small tiles share the work evenly, and one
# warp waits for no other; but more programs leave more pieces, which one of them adds up.
FEW_SEQS = 16
LEAST_TO_ADD = 4  # queries a KV head, from which that shows
FOR_FEW = _Form(programs=3, tile_bytes=8192, stages=3, warps=2, added=8192)
FOR_MANY = _Form(programs=8, tile_bytes=4096, stages=2, warps=1, added=4096)
# Of float32, and of large heads, so few warps cannot hold what they read.
FOR_WIDE = _Form(programs=2, tile_bytes=32768, stages=2, warps=4, added=8192)
MOST_NARROW = 128  # elements of a head


@dataclass(frozen=True, slots=True)
class _Plan:
    """One step's inputs on the device, and room for what the programs tell each other."""

    form: _Form
    positions: Tensor  # [S] int64
    block_tables: Tensor  # [S, M] int32
    lengths: Tensor  # [S + 1] int32
    cells: Tensor  # [S] int64, where each token's K and V go
    starts: Tensor  # [programs, 4] int32: sequence, head, tile; of all processors
    total: Tensor  # [1] int64, tiles
    arrivals: Tensor  # [S, Hkv] int32, pieces that are written; zeros between layers


class TritonDecode:
    """For any block size, KV in float32 or 16 bits; a model in float32 over 16 bits attends in the
    cache's type.
    """

    def __init__(self, kv: KvCache, heads: HeadShape) -> None:
        _check(kv, heads)
        self._kv = kv
        self._heads = heads
        device = kv.tensor.device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._overlaps = torch.cuda.get_device_capability(device)[0] >= HOPPER
        self._padded = max(int(triton.next_power_of_2(heads.head_size)), LEAST_ROWS)
        self._window = NO_WINDOW if heads.sliding_window is None else heads.sliding_window
        self._layers = [kv.layer_view(layer) for layer in range(kv.layout.num_layers)]
        most_programs = self._processors * FOR_MANY.programs
        num_pieces, rows = 2 * most_programs, heads.group_size  # a program leaves two at most
        self._pieces = torch.empty(num_pieces, rows, self._padded, device=device)
        self._piece_sums = torch.empty(num_pieces, 2, rows, device=device)
        self._plan: _Plan | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        assert set(metadata.lengths) == {1}
        self.plan_decodes(metadata.positions, metadata.block_tables)

    def plan_decodes(self, positions: Tensor, block_tables: Tensor) -> None:
        num_seqs, num_heads = len(positions), self._heads.num_kv_heads
        device = positions.device
        form = self._form(num_seqs)
        num_programs = form.programs * self._processors
        lengths = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
        cells = torch.empty(num_seqs, dtype=torch.int64, device=device)
        starts = torch.empty(num_programs, 4, dtype=torch.int32, device=device)
        total = torch.empty(1, dtype=torch.int64, device=device)
        triton_kernels.plan_decodes[(num_seqs,)](
            positions,
            block_tables,
            lengths,
            cells,
            starts,
            total,
            num_seqs,
            block_tables.stride(0),
            num_programs,
            WINDOW=self._window,
            HKV=num_heads,
            B=self._kv.layout.block_size,
            BN=self._tile(form),
            STEP=triton_kernels.STEP,
        )
        self._plan = _Plan(
            form=form,
            positions=positions,
            block_tables=block_tables,
            lengths=lengths,
            cells=cells,
            starts=starts,
            total=total,
            # Zeroed here, so that a kernel which starts when all before it are done stands between
            # the plan and those that read it before they wait.
            arrivals=torch.zeros(num_seqs, num_heads, dtype=torch.int32, device=device),
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        plan, heads, pages = self._plan, self._heads, self._layers[layer]
        assert plan is not None
        rope.rotate_and_write(q, k, v, plan.positions, Destination(pages=pages, cells=plan.cells))
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        triton_kernels.attend[(len(plan.starts),)](
            out,
            q,
            pages,
            plan.block_tables,
            plan.lengths,
            plan.starts,
            plan.total,
            plan.arrivals,
            self._pieces,
            self._piece_sums,
            plan.block_tables.stride(0),
            q.stride(0),
            q.stride(1),
            heads.scale * math.log2(math.e),  # weights are powers of two
            WINDOW=self._window,
            BLOCK_STRIDE=pages.stride(0),
            HEAD_STRIDE=pages.stride(1),
            HKV=heads.num_kv_heads,
            GROUP=heads.group_size,
            ROWS=max(int(triton.next_power_of_2(heads.group_size)), LEAST_ROWS),
            B=self._kv.layout.block_size,
            D=heads.head_size,
            DP=self._padded,
            ADDED=plan.form.added,
            BN=self._tile(plan.form),
            PRECISION="ieee",  # of float32; 16 bits know one only
            OVERLAPS=self._overlaps,
            num_warps=plan.form.warps,
            num_stages=plan.form.stages,
            launch_pdl=self._overlaps,
        )
        return out

    def _form(self, num_seqs: int) -> _Form:
        if self._kv.dtype.itemsize == torch.float32.itemsize or self._padded > MOST_NARROW:
            return FOR_WIDE
        is_few = num_seqs <= FEW_SEQS and self._heads.group_size >= LEAST_TO_ADD
        return FOR_FEW if is_few else FOR_MANY

    def _tile(self, form: _Form) -> int:
        """Positions of a tile."""
        return min(form.tile_bytes // (self._padded * self._kv.dtype.itemsize), MOST_POSITIONS)


def _check(kv: KvCache, heads: HeadShape) -> None:
    """Raise ConfigError where there is no kernel for this cache."""
    device = kv.tensor.device
    if device.type != "cuda":
        why = f"runs on GPUs, not on {device.type}"
    elif heads.head_size > MOST_HEAD_SIZE:
        why = f"takes head sizes of at most {MOST_HEAD_SIZE}, not {heads.head_size}"
    else:
        return
    raise ConfigError(f"attention_backend: 'triton' {why}; use 'sdpa'")
