"""Masks from packed bits, and what the sampler makes of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Joined, Slot
from pdserve.engine.sampler import Sampler, SampleRow
from pdserve.engine.token_masks import blocked_tokens

CPU = torch.device("cpu")
VOCAB_SIZE = 21
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def packed(*allowed: int) -> bytes:
    """The mask of these tokens."""
    bits = bytearray(-(-VOCAB_SIZE // 8))
    for token_id in allowed:
        bits[token_id // 8] |= 1 << token_id % 8
    return bytes(bits)


def make_sampler(*sampling: SamplingParams) -> Sampler:
    sampler = Sampler(max_num_seqs=8, vocab_size=VOCAB_SIZE, device=CPU)
    for i, params in enumerate(sampling):
        sampler.join(
            Joined(
                slot=Slot(i),
                sampling=params,
                choices=(0, 1),
                end_token_ids=(3,),
                prompt_len=2,
                history=(1, 2) if params.needs_history else (),
                blocks=(),
            )
        )
    return sampler


@given(st.lists(st.frozensets(st.integers(0, VOCAB_SIZE - 1)), min_size=1, max_size=4))
def test_what_a_mask_leaves_out_is_blocked(allowed):
    blocked = blocked_tokens([packed(*tokens) for tokens in allowed], VOCAB_SIZE, CPU)
    assert blocked.shape == (len(allowed), VOCAB_SIZE)
    for row, tokens in enumerate(allowed):
        assert {i for i in range(VOCAB_SIZE) if not blocked[row, i]} == tokens


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(max_tokens=9, temperature=5.0),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=1),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.01),
        SamplingParams(max_tokens=9, temperature=1.0, min_p=1.0),
        SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=2.0, repetition_penalty=9.0),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((7, 100.0), (5, -100.0))),
        SamplingParams(max_tokens=9, temperature=0.0, min_tokens=5),
    ],
)
@given(st.frozensets(st.integers(0, VOCAB_SIZE - 1), min_size=1), st.integers(0, 2**32))
def test_no_token_outside_the_mask_is_sampled_whatever_else_is_asked(sampling, allowed, seed):
    logits = 9 * torch.randn((3, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed))
    sampler = make_sampler(sampling, GREEDY)
    rows = [
        SampleRow(slot=Slot(0), choice=0, position=2),
        SampleRow(slot=Slot(0), choice=1, position=2),
        SampleRow(slot=Slot(1), choice=0, position=2),
    ]
    tokens = sampler.sample(logits, rows, {Slot(0): packed(*allowed)}).tokens.tolist()
    assert set(tokens[:2]) <= allowed
    assert tokens[2] == int(logits[2].argmax())


def test_logprobs_under_a_mask_are_those_of_the_raw_logits():
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]
    rows = [SampleRow(slot=Slot(0), choice=0, position=2)]
    sampled = make_sampler(sampling).sample(logits, rows, {Slot(0): packed(4)})
    expected = logits.log_softmax(1)[0]
    logprobs = sampled.logprobs(0)
    assert sampled.tokens.tolist() == [4]
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(float(expected[4]), rel=1e-5)
    assert logprobs.top[0][0] == VOCAB_SIZE - 1
