"""top_k, top_p and min_p against a plain reference that sorts, with ties and extreme values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.request import SamplingParams
from pdserve.engine.noise import make_lanes, noise, row_key, stream_of
from pdserve.engine.sampling_race import draw
from pdserve.engine.sampling_truncation import settle_top_p, top_k_mask, top_p_limits, top_p_mask

CPU = torch.device("cpu")
NUM_POSITIONS = 24


def kept_tokens(logits: torch.Tensor, sampling: SamplingParams) -> list[int]:
    """What may be sampled, by sorting all tokens and walking down."""
    weights = weights_of(logits, sampling).tolist()
    order = sorted(range(len(logits)), key=lambda v: (-float(logits[v]), v))
    order = order[: sampling.top_k] if sampling.top_k is not None else order
    limit = sampling.top_p * math.fsum(weights[v] for v in order)
    kept, before = [], 0.0
    for token in order:
        inside = sampling.top_p == 1.0 or before < limit
        if inside and weights[token] >= sampling.min_p:
            kept.append(token)
        before += weights[token]
    return kept


def weights_of(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    return ((logits - logits.max()) / max(sampling.temperature, 1e-30)).exp()


def keys_of(num_rows: int, seed: int) -> torch.Tensor:
    keys = [row_key(stream_of(seed, 0), position) for position in range(num_rows)]
    return torch.tensor(keys, dtype=torch.int32)


few_values = st.sampled_from([0.0, 1.0, 1.0, 1.5, 2.0, -1.0, -4.0, 30.0, -30.0, 1e4, -torch.inf])
any_value = st.floats(-20, 20, width=32)
logits_strategy = st.one_of(
    st.lists(few_values, min_size=1, max_size=40),
    st.lists(any_value, min_size=1, max_size=40),
    st.integers(1, 300).map(lambda size: [0.5] * size),
).filter(lambda values: max(values) > -torch.inf)
sampling_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([1.0, 0.7, 2.0, 100.0, 1e-2, 1e-6]),
    top_k=st.sampled_from([None, None, 1, 2, 3, 10, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.25, 0.1, 1e-3, 1e-12]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
)


@given(
    logits=logits_strategy,
    samplings=st.lists(sampling_strategy, min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=250)
def test_the_token_drawn_is_the_winner_among_those_a_sort_would_keep(logits, samplings, seed):
    values = torch.tensor(logits)
    rows = [samplings[position % len(samplings)] for position in range(NUM_POSITIONS)]
    lanes, keys = make_lanes(len(values), CPU), keys_of(NUM_POSITIONS, seed)
    tokens = draw(values.expand(NUM_POSITIONS, -1).clone(), keys, lanes, rows).tolist()
    variates = noise(keys, lanes)
    for position, sampling in enumerate(rows):
        kept = kept_tokens(values, sampling)
        scores = weights_of(values, sampling) / variates[position]
        assert tokens[position] == min(kept, key=lambda v: (float(scores[v]), v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.01, 0.3, 0.9, 0.9999])
def test_settling_and_sorting_agree_over_a_real_vocabulary(top_p, scale, dtype):
    num_rows, vocab_size = 24, 20_000
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(dtype).float()
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    limits = top_p_limits(weights, torch.full((num_rows,), top_p, dtype=torch.float64))
    variates = noise(keys_of(num_rows, 1), make_lanes(vocab_size, CPU))
    by_sort = (weights * top_p_mask(weights, logits, limits) / variates).argmin(1)
    scores = weights / variates
    tokens = scores.argmin(1)
    settle_top_p(scores, weights, logits, limits, tokens)
    assert torch.equal(tokens, by_sort)


@given(
    rows=st.lists(
        st.tuples(st.lists(few_values, min_size=12, max_size=12), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=100)
def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals(rows):
    logits = torch.tensor([values for values, _ in rows])
    top_k = torch.tensor([k for _, k in rows])
    mask = top_k_mask(logits, top_k, int(top_k.max()))
    for (values, k), row_mask in zip(rows, mask, strict=True):
        expected = sorted(range(12), key=lambda v: (-values[v], v))[:k]
        assert row_mask.nonzero().squeeze(1).tolist() == sorted(expected)
