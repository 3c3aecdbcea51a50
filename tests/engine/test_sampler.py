"""The sampler: greedy and drawn rows, who shares a batch, log-probabilities, changed logits."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Joined, Slot
from pdserve.engine.sampler import Sampler, SampleRow

CPU = torch.device("cpu")
PROMPT = (3, 1, 4, 1, 5)


def params(**changes) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100, "temperature": 0.0} | changes))


def joined(slot: int = 0, *, choices=(0,), ends=(), history=(), prompt_len=5, **changes) -> Joined:
    sampling = params(**changes)
    return Joined(
        slot=Slot(slot),
        sampling=sampling,
        choices=choices,
        end_token_ids=ends,
        prompt_len=prompt_len,
        history=(history or PROMPT) if sampling.needs_history else (),
        blocks=(),
    )


def row(slot: int = 0, position: int = 5, choice: int = 0) -> SampleRow:
    return SampleRow(slot=Slot(slot), choice=choice, position=position)


def sampler_of(*members: Joined, vocab_size: int) -> Sampler:
    sampler = Sampler(max_num_seqs=256, vocab_size=vocab_size, device=CPU)
    for member in members:
        sampler.join(member)
    return sampler


def random_logits(
    num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0
) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# ------------------------------------------------------------------------------------------ greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals(dtype):
    logits = torch.tensor([[0, 2, 1, 2], [5, 5, 5, 5], [-9, -8, -7, -7]], dtype=dtype)
    sampler = sampler_of(*(joined(slot) for slot in range(3)), vocab_size=4)
    assert sampler.sample(logits, [row(slot) for slot in range(3)]).tokens.tolist() == [1, 0, 2]


def test_a_plain_greedy_batch_costs_one_argmax():
    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    sampler = sampler_of(*(joined(slot) for slot in range(8)), vocab_size=100)
    logits = random_logits(8, 100)
    with Calls() as calls:
        sampler.sample(logits, [row(slot) for slot in range(8)])
    assert calls.names == ["argmax"]


def test_no_rows_give_no_tokens():
    sampled = sampler_of(vocab_size=10).sample(torch.empty(0, 10), [])
    assert sampled.tokens.shape == (0,)
    assert sampled.tokens.dtype == torch.int64


def test_logits_of_another_shape_are_refused_with_both_shapes():
    sampler = sampler_of(joined(), vocab_size=10)
    with pytest.raises(ValueError, match=r"expected shape \(1, 10\), got \(1, 11\)"):
        sampler.sample(torch.zeros(1, 11), [row()])


def test_the_raw_logits_stay_as_they_are():
    members = (
        joined(0, repetition_penalty=1.5),
        joined(1, temperature=0.5, top_p=0.5, logit_bias=((2, 5.0),)),
        joined(2, min_tokens=9, ends=(1,), top_k=3, temperature=1.0, min_p=0.1),
    )
    logits = random_logits(3, 50)
    before = logits.clone()
    sampler_of(*members, vocab_size=50).sample(logits, [row(slot) for slot in range(3)])
    assert torch.equal(logits, before)


# ------------------------------------------------------------------------- who shares the batch


def mixed_members() -> list[Joined]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "presence_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "logit_bias": ((3, 4.0), (9, -100.0))},
        {"frequency_penalty": 0.4, "logprobs": 2},
    ]
    return [joined(slot, seed=slot // 9, **kinds[slot % 9]) for slot in range(27)]


@pytest.mark.parametrize("vocab_size", [101, 1 << 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_token_alone_and_in_any_company(dtype, vocab_size):
    members = mixed_members()
    logits = random_logits(len(members), vocab_size).to(dtype)
    rows = [row(slot, 5 + slot) for slot in range(len(members))]
    together = sampler_of(*members, vocab_size=vocab_size).sample(logits, rows).tokens
    backwards = sampler_of(*members, vocab_size=vocab_size).sample(logits.flip(0), rows[::-1])
    assert torch.equal(backwards.tokens.flip(0), together)
    for slot, member in enumerate(members):
        alone = sampler_of(member, vocab_size=vocab_size).sample(logits[[slot]], [rows[slot]])
        assert alone.tokens[0] == together[slot]


def test_the_slot_does_not_matter():
    logits = random_logits(1, 1000)
    tokens = {
        int(
            sampler_of(joined(slot, temperature=1.0, seed=8), vocab_size=1000)
            .sample(logits, [row(slot)])
            .tokens
        )
        for slot in range(8)
    }
    assert len(tokens) == 1


def test_choices_of_one_slot_are_drawn_apart():
    logits = torch.zeros(1, 1000)
    sampler = sampler_of(joined(choices=(0, 1, 2, 3), temperature=1.0, seed=1), vocab_size=1000)
    rows = [row(choice=choice) for choice in range(4)]
    tokens = sampler.sample(logits.expand(4, -1), rows).tokens.tolist()
    assert len(set(tokens)) == 4
    # A choice goes on in a slot of its own with the same noise.
    other = sampler_of(joined(9, choices=(2,), temperature=1.0, seed=1), vocab_size=1000)
    assert other.sample(logits, [row(9, choice=2)]).tokens.tolist() == [tokens[2]]


def test_a_slot_can_be_used_again_after_its_tenant_left():
    sampler = sampler_of(joined(logit_bias=((7, 100.0),), frequency_penalty=2.0), vocab_size=10)
    assert int(sampler.sample(torch.zeros(1, 10), [row()]).tokens) == 7
    sampler.leave(Slot(0))
    sampler.join(joined(presence_penalty=1.0))
    assert int(sampler.sample(torch.zeros(1, 10), [row()]).tokens) == 0
    assert int(sampler.sample(torch.zeros(1, 10), [row(position=6)]).tokens) == 1


# ------------------------------------------------------------------------------------- frequencies


def frequencies(logits: torch.Tensor, num_draws: int, **changes) -> torch.Tensor:
    vocab_size = len(logits)
    sampler = sampler_of(joined(prompt_len=0, **changes), vocab_size=vocab_size)
    rows = [row(position=position) for position in range(num_draws)]
    tokens = sampler.sample(logits.expand(num_draws, -1), rows).tokens
    return torch.bincount(tokens, minlength=vocab_size)


def chi_square_bound(num_cells: int) -> float:
    return num_cells - 1 + 4 * math.sqrt(2 * (num_cells - 1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_draws_follow_the_softmax(seed, temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -2.0, 1.5, 0.3])
    counts = frequencies(logits, 20_000, temperature=temperature, seed=seed)
    expected = (logits / temperature).softmax(0) * 20_000
    assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_bound(8)


def test_draws_over_a_large_flat_vocabulary_are_uniform():
    counts = frequencies(torch.zeros(1000), 50_000, temperature=1.0)
    assert float(((counts - 50.0) ** 2 / 50.0).sum()) < chi_square_bound(1000)


def test_rare_tokens_come_as_often_as_they_should():
    logits = torch.full((2000,), -12.0)
    logits[0] = 0.0
    counts = frequencies(logits, 100_000, temperature=1.0, seed=3)
    expected = 100_000 * (1 - float(logits.softmax(0)[0]))
    assert abs(int(counts[1:].sum()) - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.6}, 2),  # probabilities 0.495, 0.300, 0.067 three times, 0.003
        ({"min_p": 0.1}, 5),
        ({"top_k": 4, "top_p": 0.6}, 2),
    ],
)
def test_draws_follow_the_softmax_of_what_truncation_keeps(changes, kept):
    logits = torch.tensor([0.0, 2.0, 0.0, 1.5, -3.0, 0.0])
    counts = frequencies(logits, 20_000, temperature=1.0, **changes)
    order = logits.argsort(descending=True, stable=True)[:kept]
    expected = torch.zeros(6)
    expected[order] = logits[order].softmax(0) * 20_000
    assert not counts[expected == 0].any()
    inside = expected > 0
    terms = (counts - expected)[inside] ** 2 / expected[inside]
    assert float(terms.sum()) < chi_square_bound(kept)


def test_pairs_of_neighbouring_positions_are_independent():
    sampler = sampler_of(joined(temperature=1.0, prompt_len=0), vocab_size=4)
    rows = [row(position=position) for position in range(40_000)]
    tokens = sampler.sample(torch.zeros(40_000, 4), rows).tokens
    for lag in (1, 2, 7):
        pairs = torch.bincount(tokens[lag:] * 4 + tokens[:-lag], minlength=16)
        expected = (40_000 - lag) / 16
        assert float(((pairs - expected) ** 2 / expected).sum()) < chi_square_bound(16)


# -------------------------------------------------------------------------------- extreme values


EXTREME = [
    {"temperature": 1e-6},
    {"temperature": 1e-45},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1e-6, "top_p": 1e-9, "top_k": 5, "min_p": 0.5},
]


@pytest.mark.parametrize("changes", EXTREME)
@pytest.mark.parametrize("scale", [0.001, 1.0, 1e4, 1e30])
def test_truncation_to_one_token_is_greedy(changes, scale):
    logits = random_logits(16, 500, scale=scale)
    sampler = sampler_of(joined(**changes), vocab_size=500)
    tokens = sampler.sample(logits, [row(position=position) for position in range(16)]).tokens
    assert torch.equal(tokens, logits.argmax(1))


@pytest.mark.parametrize(
    "changes", [{"temperature": 1.0}, {"temperature": 5.0, "top_p": 0.99}, *EXTREME]
)
def test_the_only_possible_token_is_chosen(changes):
    logits = torch.full((200, 300), -torch.inf)
    logits[:, 123] = -50.0
    sampler = sampler_of(joined(**changes), vocab_size=300)
    rows = [row(position=position) for position in range(200)]
    assert set(sampler.sample(logits, rows).tokens.tolist()) == {123}


def test_a_masked_token_is_never_drawn():
    logits = torch.zeros(5000, 4)
    logits[:, 2] = -torch.inf
    sampler = sampler_of(joined(temperature=100.0), vocab_size=4)
    rows = [row(position=position) for position in range(5000)]
    assert set(sampler.sample(logits, rows).tokens.tolist()) == {0, 1, 3}


# ---------------------------------------------------------------------------- changes to the logits


def test_logit_bias_forces_and_forbids():
    members = (
        joined(0, logit_bias=((5, 100.0),)),
        joined(1, logit_bias=((1, -100.0), (2, -100.0))),
        joined(2, temperature=1.0, logit_bias=((6, 100.0),)),
        joined(3, logit_bias=((99, 100.0), (-1, 100.0))),  # not in the vocabulary
    )
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0, 0.0, 0.0, 0.0]]).repeat(4, 1)
    sampled = sampler_of(*members, vocab_size=7).sample(logits, [row(slot) for slot in range(4)])
    assert sampled.tokens.tolist() == [5, 3, 6, 1]


def test_end_tokens_are_masked_until_min_tokens_outputs_exist():
    sampler = sampler_of(joined(min_tokens=2, ends=(1, 3, 1000)), vocab_size=5)
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0, 0.0]])
    tokens = [int(sampler.sample(logits, [row(position=p)]).tokens) for p in (5, 6, 7, 8)]
    assert tokens == [2, 2, 1, 1]


def test_end_tokens_win_over_a_bias_that_wants_them():
    sampler = sampler_of(joined(min_tokens=1, ends=(1,), logit_bias=((1, 100.0),)), vocab_size=3)
    assert int(sampler.sample(torch.zeros(1, 3), [row()]).tokens) == 0


# ------------------------------------------------------------------------------- log-probabilities


def test_logprobs_are_those_of_the_raw_logits():
    members = (
        joined(0),
        joined(1, logprobs=3),
        joined(2, logprobs=0),
        joined(3, logprobs=2, temperature=0.1, top_k=1, logit_bias=((0, 100.0),)),
    )
    logits = random_logits(4, 30)
    sampled = sampler_of(*members, vocab_size=30).sample(logits, [row(slot) for slot in range(4)])
    expected = logits.double().log_softmax(1)
    assert sampled.logprobs(0) is None
    for index, num_top in [(1, 3), (2, 0), (3, 2)]:
        logprobs = sampled.logprobs(index)
        assert logprobs is not None
        token = int(sampled.tokens[index])
        assert logprobs.logprob == pytest.approx(float(expected[index, token]), abs=1e-5)
        best = expected[index].topk(num_top)
        assert [token_id for token_id, _ in logprobs.top] == best.indices.tolist()
        values = [value for _, value in logprobs.top]
        assert values == pytest.approx(best.values.tolist(), abs=1e-5)
    assert int(sampled.tokens[3]) == 0


def test_more_logprobs_than_tokens_gives_all_of_them():
    sampled = sampler_of(joined(logprobs=20), vocab_size=3).sample(torch.zeros(1, 3), [row()])
    logprobs = sampled.logprobs(0)
    assert logprobs is not None
    assert [token_id for token_id, _ in logprobs.top] == [0, 1, 2]
    assert [value for _, value in logprobs.top] == pytest.approx([-math.log(3)] * 3)


def test_without_logprobs_there_are_none():
    sampled = sampler_of(joined(), vocab_size=3).sample(torch.zeros(1, 3), [row()])
    assert sampled.logprobs(0) is None
