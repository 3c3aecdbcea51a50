"""The kernels that end a captured step keep its logits and find what ``argmax`` finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.likeliest import keep_likeliest_plainly, likeliest_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = torch.device("cuda:0")


@settings(max_examples=25)
@given(
    num_rows=st.integers(1, 70),
    vocab_size=st.sampled_from([1, 50, 8192, 8193, 49_152, 128_256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1 << 40),
)
def test_it_is_argmax_and_a_copy(
    num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    wider = (torch.randn(num_rows, vocab_size + 16, device=GPU) * 4).to(dtype)  # ties in 16 bits
    logits = wider[:, :vocab_size]
    kept = [torch.full((num_rows, vocab_size), 7.0, dtype=dtype, device=GPU) for _ in range(2)]
    tokens = [torch.full((num_rows,), -1, device=GPU) for _ in range(2)]
    likeliest_on(GPU)(logits, kept[0], tokens[0])
    keep_likeliest_plainly(logits, kept[1], tokens[1])
    assert torch.equal(kept[0], kept[1])
    numbers = torch.arange(vocab_size, device=GPU)
    largest = logits == logits.amax(1, keepdim=True)
    least_ids = torch.where(largest, numbers, vocab_size).amin(1)  # argmax may take another of them
    assert torch.equal(tokens[0], least_ids)
    assert bool(largest.gather(1, tokens[1][:, None]).all())


def test_no_gpu_is_the_plain_one() -> None:
    assert likeliest_on(torch.device("cpu")) is keep_likeliest_plainly
