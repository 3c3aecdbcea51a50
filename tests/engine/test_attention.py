"""Every attention backend gives what dense attention over the whole history gives."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.attention.by_step import ByStep
from pdserve.engine.attention.interface import AttentionBackend, AttentionMetadata, HeadShape
from pdserve.engine.attention.sdpa import SdpaAttention
from pdserve.engine.attention.select import make_backend
from pdserve.engine.kernels.interface import Kernels, Rope
from pdserve.engine.kernels.torch_kernels import TorchKernels
from pdserve.engine.kv_cache import KvCache

CPU = torch.device("cpu")
ON_CPU = ("sdpa", "cpu_paged")
NUM_LAYERS = 2
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: chunks ``(start, length)`` over a cache whose blocks are dealt out at random."""

    heads: HeadShape
    block_size: int
    chunks: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    kv_dtype: str = "float32"
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.integers(1, 3))
    heads = HeadShape(
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 7])),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from([16, 48, 64, 80, 128])),
        sliding_window=draw(st.none() | st.integers(1, 90)),
    )
    lengths = st.one_of(st.just(1), st.integers(2, 12), st.integers(13, 150))
    chunk = st.tuples(st.just(0) | st.integers(0, 200), lengths)
    return Case(
        heads=heads,
        block_size=draw(st.integers(1, 33) | st.sampled_from([16, 64, 100])),
        chunks=tuple(draw(st.lists(chunk, min_size=1, max_size=4))),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        kv_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        seed=draw(st.integers(0, 1000)),
    )


class Step:
    """A case made real: a filled cache, the step's q, k and v, and what dense attention gives."""

    def __init__(
        self, case: Case, device: torch.device = CPU, *, unwritten: float = math.nan
    ) -> None:
        self.case = case
        self.device = device
        self._random = torch.Generator().manual_seed(case.seed)
        heads, dtype = case.heads, getattr(torch, case.dtype)
        layout = KvLayout(
            num_layers=NUM_LAYERS,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            block_size=case.block_size,
            dtype=case.kv_dtype,
            tp_size=1,
        )
        counts = [layout.num_blocks_for(start + length) for start, length in case.chunks]
        self.kv = KvCache(layout, sum(counts) + 3, device)
        self.kv.tensor.fill_(unwritten)  # whatever is not written must not matter
        blocks = torch.randperm(self.kv.num_blocks, generator=self._random).int()
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, dealt in enumerate(blocks[: sum(counts)].split(counts)):
            self.tables[row, : len(dealt)] = dealt
        self.tables = self.tables.to(device)
        num_tokens = sum(length for _, length in case.chunks)
        num_rows = heads.num_heads + 2 * heads.num_kv_heads
        self._qkv = self._draw(num_tokens, num_rows, heads.head_size).to(dtype)
        longest = max(start + length for start, length in case.chunks)
        angles = self._draw(longest, heads.head_size // 2)
        self.rope_table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.histories = [self._write_history(row) for row in range(len(case.chunks))]

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The step's q, k and v, to be rotated in place: views of one fresh tensor."""
        heads = self.case.heads
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        q, k, v = self._qkv.clone().split(counts, dim=1)
        return q, k, v

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self.device)

    def _write_history(self, row: int) -> Tensor:
        """K and V ``[2, start, Hkv, D]`` before the chunk, in the pages of every layer."""
        start, _ = self.case.chunks[row]
        shape = (2, start, self.case.heads.num_kv_heads, self.case.heads.head_size)
        history = self._draw(*shape).to(self.kv.dtype)
        positions = torch.arange(start, device=self.device)
        blocks = self.tables[row, positions // self.case.block_size].long()
        rows = history.permute(1, 2, 0, 3)  # [start, Hkv, 2, D]
        self.kv.tensor[blocks, :, :, :, positions % self.case.block_size] = rows[:, :, None]
        return history.float()

    @property
    def metadata(self) -> AttentionMetadata:
        ranges = [torch.arange(start, start + length) for start, length in self.case.chunks]
        return AttentionMetadata(
            starts=tuple(start for start, _ in self.case.chunks),
            lengths=tuple(length for _, length in self.case.chunks),
            positions=torch.cat(ranges).to(self.device),
            block_tables=self.tables,
        )

    def dense(self) -> Tensor:
        """``[T, Hq * D]`` float32, position by position."""
        heads, out, token = self.case.heads, [], 0
        q_rows, k_rows, v_rows = self.qkv()
        TorchKernels().rotate(q_rows, k_rows, self.metadata.positions, self.rope_table, None)
        new = torch.stack((k_rows, v_rows)).to(self.kv.dtype).float()
        for (start, length), history in zip(self.case.chunks, self.histories, strict=True):
            keys, values = torch.cat((history, new[:, token : token + length]), dim=1)
            for position in range(start, start + length):
                window = heads.sliding_window or position + 1
                seen = slice(max(0, position + 1 - window), position + 1)
                q = q_rows[token].float().view(heads.num_kv_heads, heads.group_size, -1)
                scores = torch.einsum("hgd,nhd->hgn", q, keys[seen]) * heads.scale
                out.append(torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values[seen]).flatten())
                token += 1
        return torch.stack(out)


def attend(backend: AttentionBackend, step: Step, kernels: Kernels | None = None) -> Tensor:
    backend.plan(step.metadata)
    rope = Rope(kernels=kernels or TorchKernels(), table=step.rope_table)
    first = backend.run(0, *step.qkv(), rope)
    assert torch.equal(backend.run(1, *step.qkv(), rope), first)
    return first.float()


@pytest.mark.parametrize("name", ON_CPU)
@given(case=cases())
@settings(max_examples=40)
def test_any_mix_of_chunks_is_dense_attention(name: str, case: Case) -> None:
    step = Step(case)
    found = attend(make_backend(name, step.kv, case.heads, CPU), step)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(found, step.dense(), atol=tolerance, rtol=tolerance)


@given(case=cases())
@settings(max_examples=20)
def test_backends_write_the_same_cache(case: Case) -> None:
    steps = [Step(case) for _ in ON_CPU]
    for name, step in zip(ON_CPU, steps, strict=True):
        attend(make_backend(name, step.kv, case.heads, CPU), step)
    caches = [step.kv.tensor.nan_to_num(nan=-7.0) for step in steps]
    assert torch.equal(caches[0], caches[1])


@pytest.mark.parametrize("name", ON_CPU)
def test_blocks_beyond_two_to_the_31_elements(name: str) -> None:
    heads = HeadShape(num_heads=8, num_kv_heads=8, head_size=128)
    layout = KvLayout(
        num_layers=32, num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16", tp_size=1
    )
    kv = KvCache(layout, 2060, CPU)  # 4.3 GB, of which only what is written becomes real
    assert kv.tensor[2055].storage_offset() > 1 << 31
    qkv = torch.randn(3, 20, 8, 128, generator=torch.Generator().manual_seed(0))
    rope = Rope(kernels=TorchKernels(), table=torch.randn(20, 128))
    outputs = []
    for blocks in ([0, 1], [2059, 2055]):
        backend = make_backend(name, kv, heads, CPU)
        tables = torch.tensor([blocks], dtype=torch.int32)
        positions = torch.arange(20)
        backend.plan(
            AttentionMetadata(starts=(0,), lengths=(20,), positions=positions, block_tables=tables)
        )
        q, k, v = qkv.clone()
        outputs.append(backend.run(31, q, k, v, rope))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(kv.tensor[2059, :, 31], kv.tensor[0, :, 31])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_number_of_threads_does_not_change_a_bit(dtype: str) -> None:
    case = Case(
        heads=HeadShape(num_heads=6, num_kv_heads=2, head_size=64),
        block_size=16,
        chunks=((500, 1), (30, 300), (700, 1), (0, 90), (64, 3)),
        dtype=dtype,
        kv_dtype=dtype,
    )
    outputs = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        step = Step(case)
        outputs.append(attend(make_backend("cpu_paged", step.kv, case.heads, CPU), step))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_an_unknown_backend_is_refused_by_name() -> None:
    heads = HeadShape(num_heads=1, num_kv_heads=1, head_size=16)
    step = Step(Case(heads=heads, block_size=4, chunks=((0, 1),)))
    with pytest.raises(
        ConfigError, match="'flash' is not one of auto, cpu_paged, flash_attn, sdpa, triton"
    ):
        make_backend("flash", step.kv, heads, CPU)


def test_head_sizes_that_the_c_code_cannot_do_run_on_sdpa() -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=24)
    step = Step(Case(heads=heads, block_size=4, chunks=((3, 2),)))
    with pytest.raises(ConfigError, match="use 'sdpa'"):
        make_backend("cpu_paged", step.kv, heads, CPU)
    found = attend(make_backend("auto", step.kv, heads, CPU), step)
    torch.testing.assert_close(found, step.dense())


@pytest.mark.parametrize("name", ["flash_attn", "triton"])
def test_a_backend_whose_package_is_not_here_is_refused_by_name(name: str) -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=16)
    step = Step(Case(heads=heads, block_size=4, chunks=((3, 2),)))
    with pytest.raises(ConfigError, match=f"'{name}'"):
        make_backend(name, step.kv, heads, CPU)


class Decodes:
    """A backend for steps of one token each that counts them."""

    def __init__(self, step: Step) -> None:
        self._sdpa = SdpaAttention(step.kv, step.case.heads)
        self.num_planned = 0

    def plan(self, metadata: AttentionMetadata) -> None:
        assert set(metadata.lengths) == {1}
        self.num_planned += 1
        self._sdpa.plan(metadata)

    def plan_decodes(self, positions: Tensor, block_tables: Tensor) -> None:
        starts = tuple(positions.tolist())
        self.plan(
            AttentionMetadata(
                starts=starts,
                lengths=(1,) * len(starts),
                positions=positions,
                block_tables=block_tables,
            )
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        return self._sdpa.run(layer, q, k, v, rope)


@pytest.mark.parametrize(
    ("chunks", "num_planned"),
    [(((5, 1), (0, 1)), 1), (((5, 1), (0, 2)), 0), (((0, 9),), 0)],
)
def test_only_steps_of_one_token_each_go_to_the_backend_for_decodes(
    chunks: tuple[tuple[int, int], ...], num_planned: int
) -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=16)
    step = Step(Case(heads=heads, block_size=4, chunks=chunks))
    decodes = Decodes(step)
    both = ByStep(decodes, SdpaAttention(step.kv, heads))
    torch.testing.assert_close(attend(both, step), step.dense())
    assert decodes.num_planned == num_planned
    assert not both.captures_chunks  # sdpa cannot
