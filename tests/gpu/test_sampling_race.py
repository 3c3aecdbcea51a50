"""The race in one kernel draws what the race in plain torch draws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.request import SamplingParams
from pdserve.engine.noise import make_lanes, noise, row_key, stream_of
from pdserve.engine.sampling_race import Lots, draw, fast_race

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = torch.device("cuda:0")
ROUNDING = 1e-5  # exponentials and sums of the two differ by less


@st.composite
def samplings(draw_one: st.DrawFn) -> SamplingParams:
    top_k = draw_one(st.none() | st.integers(1, 50))
    return SamplingParams(
        max_tokens=1,
        temperature=draw_one(st.floats(0.05, 3)),
        top_k=top_k,
        top_p=1.0 if top_k else draw_one(st.just(1.0) | st.floats(0.01, 0.999)),
        min_p=draw_one(st.just(0.0) | st.floats(0.0, 0.5)),
    )


@settings(max_examples=25)
@given(
    vocab_size=st.sampled_from([1, 50, 4096, 4097, 49_152, 128_256]),
    wants=st.lists(samplings(), min_size=1, max_size=9),
    spread=st.floats(0.1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 40),
)
def test_it_draws_what_the_plain_race_draws(
    vocab_size: int, wants: list[SamplingParams], spread: float, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    race = fast_race(GPU)
    assert race is not None
    assert all(map(race.can_draw, wants))
    wider = torch.randn(len(wants) + 3, vocab_size + 16, device=GPU) * spread
    logits = wider.to(dtype)[:, :vocab_size]  # rows with a stride of their own
    rows = torch.randperm(len(wants) + 3)[: len(wants)].tolist()
    keys = [row_key(stream_of(seed, 0), number) for number in range(len(wants))]
    found = race.draw(logits, Lots.of(rows, keys, wants))
    keys_there = torch.tensor(keys, dtype=torch.int32, device=GPU)
    lanes = make_lanes(vocab_size, GPU)
    chosen = logits[rows].float()
    expected = draw(chosen, keys_there, lanes, wants)
    # Where they differ it is by rounding: a near tie, or a token on top_p's or min_p's border.
    differ = (found != expected).nonzero().squeeze(1).tolist()
    for row in differ:
        want, two = wants[row], torch.stack((found[row], expected[row]))
        weights = ((chosen[row] - chosen[row].amax()) / want.temperature).exp().double()
        scores = (weights / noise(keys_there[row : row + 1], lanes)[0].double())[two]
        near = bool((scores[0] / scores[1] - 1).abs() < ROUNDING)
        before = [
            weights[(chosen[row] > chosen[row, token])].sum() / weights.sum() for token in two
        ]
        near_top_p = any(abs(float(share) - want.top_p) < ROUNDING for share in before)
        near_min_p = any(abs(float(weights[token]) - want.min_p) < ROUNDING for token in two)
        assert near or near_top_p or near_min_p, (want, two, scores)


def test_an_infinite_logit_ends_too() -> None:
    """No weight is a number then; any token will do, but a step that never ends would not."""
    race = fast_race(GPU)
    assert race is not None
    logits = torch.randn(1, 5000, device=GPU)
    logits[0, 7] = torch.inf
    for top_k, min_p in ((1, 0.0), (1, 0.1), (3, 0.0)):
        want = SamplingParams(max_tokens=1, top_k=top_k, min_p=min_p)
        (token,) = race.draw(logits, Lots.of([0], [(1, 2)], [want])).tolist()
        assert 0 <= token < 5000


def test_where_top_p_counts_among_top_k_it_is_left_to_the_plain_race() -> None:
    race = fast_race(GPU)
    assert race is not None
    assert not race.can_draw(SamplingParams(max_tokens=1, top_k=5, top_p=0.9))
    assert fast_race(torch.device("cpu")) is None
