"""FlashAttention gives what dense attention over the whole history gives, and what sdpa gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.engine.attention.interface import AttentionBackend, HeadShape
from pdserve.engine.attention.sdpa import SdpaAttention
from pdserve.engine.attention.select import make_backend
from pdserve.engine.kv_cache import POISON
from tests.engine.test_attention import Case, Step, attend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # each kind of kernel is compiled once

GPU = torch.device("cuda:0")
TOLERANCE = 2e-2  # of 16-bit inputs and results near one


def flash_attention(step: Step) -> AttentionBackend:
    return make_backend("flash_attn", step.kv, step.case.heads, GPU)  # by name: it is optional


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Few head shapes: each is a kernel to compile."""
    num_heads, num_kv_heads, size = draw(
        st.sampled_from([(4, 1, 64), (32, 8, 128), (3, 3, 128), (14, 2, 64)])
    )
    lengths = st.one_of(st.just(1), st.integers(2, 12), st.integers(13, 300))
    chunk = st.tuples(st.just(0) | st.integers(0, 400), lengths)
    return Case(
        heads=HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=size),
        block_size=draw(st.sampled_from([8, 16, 24, 64, 128, 256])),
        chunks=tuple(draw(st.lists(chunk, min_size=1, max_size=5))),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        seed=draw(st.integers(0, 1000)),
    )


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_any_mix_of_chunks_is_dense_attention_and_sdpa(case: Case) -> None:
    ours, oracle = (Step(case, GPU, unwritten=POISON) for _ in range(2))
    found = attend(flash_attention(ours), ours)
    torch.testing.assert_close(found, ours.dense(), atol=TOLERANCE, rtol=TOLERANCE)
    expected = attend(SdpaAttention(oracle.kv, case.heads), oracle)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(ours.kv.tensor, oracle.kv.tensor)


@pytest.mark.parametrize("window", [1, 17, 100])
@pytest.mark.parametrize("start", [0, 37, 300])
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
        assert isinstance(make_backend("auto", step.kv, heads, GPU), SdpaAttention)
    assert reason in caplog.text


def test_auto_takes_it_where_it_runs() -> None:
    heads = HeadShape(num_heads=8, num_kv_heads=2, head_size=64)
    step = Step(Case(heads=heads, block_size=16, chunks=((0, 1),), kv_dtype="bfloat16"), GPU)
    assert type(make_backend("auto", step.kv, heads, GPU)) is type(flash_attention(step))
