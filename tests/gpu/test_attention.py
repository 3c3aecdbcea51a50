"""Attention on GPUs is dense attention over the whole history, and what sdpa gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.by_step import ByStep
from pdserve.engine.attention.interface import AttentionBackend, CapturableBackend, HeadShape
from pdserve.engine.attention.sdpa import SdpaAttention
from pdserve.engine.attention.select import make_backend
from pdserve.engine.kernels.interface import Kernels, Rope
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.kv_cache import POISON
from tests.engine.test_attention import TOLERANCE as TOLERANCES
from tests.engine.test_attention import Case, Step, attend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # each kind of kernel is compiled once

GPU = torch.device("cuda:0")
TOLERANCE = 2e-2  # of 16-bit inputs and results near one


def flash_attention(step: Step) -> AttentionBackend:
    return make_backend("flash_attn", step.kv, step.case.heads, GPU)  # by name: it is optional


def triton_attention(step: Step) -> AttentionBackend:
    return make_backend("triton", step.kv, step.case.heads, GPU)


def fused() -> Kernels:
    return make_kernels("triton", GPU)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few head shapes: each is a kernel to compile."""
    num_heads, num_kv_heads, size = draw(st.sampled_from([(32, 8, 128), (3, 3, 128), (14, 2, 64)]))
    lengths = st.one_of(st.just(1), st.integers(2, 12), st.integers(13, 300))
    chunk = st.tuples(st.just(0) | st.integers(0, 400), lengths)
    return Case(
        heads=HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=size),
        block_size=draw(st.sampled_from([16, 24, 128])),
        chunks=tuple(draw(st.lists(chunk, min_size=1, max_size=5))),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        seed=draw(st.integers(0, 1000)),
    )


@given(case=cases())
@settings(max_examples=30)
def test_any_mix_of_chunks_is_dense_attention_and_sdpa(case: Case) -> None:
    ours, oracle = (Step(case, GPU, unwritten=POISON) for _ in range(2))
    found = attend(flash_attention(ours), ours, fused())
    torch.testing.assert_close(found, ours.dense(), atol=TOLERANCE, rtol=TOLERANCE)
    expected = attend(SdpaAttention(oracle.kv, case.heads), oracle, fused())
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(ours.kv.tensor, oracle.kv.tensor)


@pytest.mark.parametrize(("window", "start"), [(1, 37), (17, 0), (17, 300), (100, 300)])
def test_a_sliding_window(window: int, start: int) -> None:
    heads = HeadShape(num_heads=8, num_kv_heads=2, head_size=64, sliding_window=window)
    case = Case(
        heads=heads,
        block_size=16,
        chunks=((start, 70), (start, 1)),
        dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    step = Step(case, GPU, unwritten=POISON)
    found = attend(flash_attention(step), step)
    torch.testing.assert_close(found, step.dense(), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_float32_model_over_a_16_bit_cache() -> None:
    heads = HeadShape(num_heads=8, num_kv_heads=2, head_size=64)
    case = Case(heads=heads, block_size=16, chunks=((40, 9), (3, 1)), kv_dtype="bfloat16")
    step = Step(case, GPU, unwritten=POISON)
    found = attend(flash_attention(step), step)
    torch.testing.assert_close(found, step.dense(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("kv_dtype", "head_size", "reason"),
    [("float32", 64, "takes bfloat16 or float16 KV"), ("bfloat16", 20, "head sizes of 8 to 128")],
)
def test_what_it_cannot_do_is_refused_by_name_and_auto_passes_over_it(
    kv_dtype: str, head_size: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=head_size)
    case = Case(heads=heads, block_size=16, chunks=((3, 2),), kv_dtype=kv_dtype)
    step = Step(case, GPU)
    with pytest.raises(ConfigError, match=reason):
        make_backend("flash_attn", step.kv, heads, GPU)
    with caplog.at_level("INFO"):
        assert isinstance(make_backend("auto", step.kv, heads, GPU), ByStep)
    assert reason in caplog.text
    assert "triton for decode steps, sdpa for all others" in caplog.text


def test_auto_takes_both_where_they_run(caplog: pytest.LogCaptureFixture) -> None:
    heads = HeadShape(num_heads=8, num_kv_heads=2, head_size=64)
    step = Step(Case(heads=heads, block_size=16, chunks=((0, 1),), kv_dtype="bfloat16"), GPU)
    with caplog.at_level("INFO"):
        make_backend("auto", step.kv, heads, GPU)
    assert "triton for decode steps, flash_attn for all others" in caplog.text


def test_triton_refuses_huge_heads_by_name() -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=288)
    step = Step(Case(heads=heads, block_size=16, chunks=((3, 1),)), GPU)
    with pytest.raises(ConfigError, match="'triton' takes head sizes of at most 256"):
        triton_attention(step)


# Few head shapes, dtypes and block sizes together: each is a kernel to compile.
DECODE_SHAPES = [
    ((4, 1, 64), 16, "bfloat16", "bfloat16"),
    ((32, 8, 128), 16, "bfloat16", "bfloat16"),
    ((14, 2, 64), 24, "bfloat16", "bfloat16"),
    ((3, 3, 80), 100, "float16", "float16"),
    ((8, 2, 128), 5, "float32", "float32"),
    ((20, 1, 40), 64, "float32", "bfloat16"),
]


@st.composite
def decode_cases(draw: st.DrawFn) -> Case:
    """One token each, at few and at many positions; more rows than programs, and fewer."""
    (num_heads, num_kv_heads, size), block_size, dtype, kv_dtype = draw(
        st.sampled_from(DECODE_SHAPES)
    )
    starts = st.one_of(st.just(0), st.integers(0, 70), st.integers(0, 1500))
    return Case(
        heads=HeadShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            sliding_window=draw(st.sampled_from([None, 17, 100])),
        ),
        block_size=block_size,
        chunks=tuple((start, 1) for start in draw(st.lists(starts, min_size=1, max_size=40))),
        dtype=dtype,
        kv_dtype=kv_dtype,
        seed=draw(st.integers(0, 1000)),
    )


@given(case=decode_cases())
@settings(max_examples=40)
def test_decode_steps_in_triton_are_dense_attention_and_sdpa(case: Case) -> None:
    ours, oracle = (Step(case, GPU) for _ in range(2))
    found = attend(triton_attention(ours), ours, fused())
    expected = attend(SdpaAttention(oracle.kv, case.heads), oracle, fused())
    tolerance = TOLERANCES["float32"] if case.kv_dtype == "float32" else TOLERANCE
    torch.testing.assert_close(found, ours.dense(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.kv.tensor.nan_to_num(nan=-7.0), oracle.kv.tensor.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("lengths", [(8000,), (1, 5000, 3), (640,) * 70])
def test_rows_that_lie_in_many_programs_or_few(lengths: tuple[int, ...]) -> None:
    case = Case(
        heads=HeadShape(num_heads=8, num_kv_heads=2, head_size=64),
        block_size=256,
        chunks=tuple((length - 1, 1) for length in lengths),
        dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    step = Step(case, GPU)
    backend = triton_attention(step)
    for _ in range(3):  # what programs count in is zero again after each layer
        found = attend(backend, step, fused())
        torch.testing.assert_close(found, step.dense(), atol=TOLERANCE, rtol=TOLERANCE)


def test_one_graph_serves_any_lengths() -> None:
    """Captured at one token each, replayed at others: the work is shared anew from the lengths."""
    case = Case(
        heads=HeadShape(num_heads=8, num_kv_heads=2, head_size=64),
        block_size=16,
        chunks=((1999, 1), (3, 1), (700, 1)),
        dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    step = Step(case, GPU)
    backend = triton_attention(step)
    assert isinstance(backend, CapturableBackend)
    rope = Rope(kernels=fused(), table=step.rope_table)
    positions = torch.zeros(3, dtype=torch.int64, device=GPU)
    tables = torch.zeros_like(step.tables)
    q, k, v = step.qkv()
    backend.plan_decodes(positions, tables)
    backend.run(0, q, k, v, rope)  # compiles, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.plan_decodes(positions, tables)
        found = backend.run(1, q, k, v, rope)
    positions.copy_(step.metadata.positions)
    tables.copy_(step.tables)
    for held, fresh in zip((q, k, v), step.qkv(), strict=True):
        held.copy_(fresh)
    graph.replay()
    torch.testing.assert_close(found.float(), step.dense(), atol=TOLERANCE, rtol=TOLERANCE)
