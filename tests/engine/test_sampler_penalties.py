"""Penalties against a plain reference, step by step."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Joined, Slot
from pdserve.engine.penalties import Penalties
from pdserve.engine.sampler import Sampler, SampleRow

CPU = torch.device("cpu")
VOCAB = 12


def expected_logits(logits, prompt, outputs, sampling):
    """The formula, token by token, in float32."""
    counts, changed = Counter(outputs), logits.clone()
    repetition = torch.tensor(sampling.repetition_penalty)
    for token in set(prompt) | set(outputs):
        value = changed[token]
        changed[token] = value / repetition if value > 0 else value * repetition
    for token, count in counts.items():
        changed[token] -= torch.tensor(sampling.frequency_penalty) * count
        changed[token] -= torch.tensor(sampling.presence_penalty)
    return changed


penalties_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, -1.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.5, 2.0]),
)
tokens_strategy = st.lists(st.integers(0, VOCAB - 1), max_size=20)


@given(
    members=st.lists(
        st.tuples(penalties_strategy, tokens_strategy, tokens_strategy, tokens_strategy),
        min_size=1,
        max_size=7,
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_penalties_are_those_of_a_plain_loop_over_the_history(members, seed):
    penalties = Penalties(VOCAB, CPU)
    slots = [Slot(3 * i) for i in range(len(members))]
    for slot, (_, prompt, outputs, _) in zip(slots, members, strict=True):
        penalties.join(slot, (1, *prompt, *outputs), 1 + len(prompt))
    for slot, (_, _, _, later) in zip(slots, members, strict=True):
        for token in later:
            penalties.add([slot], torch.tensor([token]))
    logits = torch.randn(2 * len(slots), VOCAB, generator=torch.Generator().manual_seed(seed))
    changed = logits.clone()
    rows = torch.arange(len(slots)) * 2
    penalties.apply_(changed, rows, slots, [sampling for sampling, *_ in members])
    for i, (sampling, prompt, outputs, later) in enumerate(members):
        expected = expected_logits(logits[2 * i], [1, *prompt], outputs + later, sampling)
        torch.testing.assert_close(changed[2 * i], expected)
        assert torch.equal(changed[2 * i + 1], logits[2 * i + 1])


def test_masked_logits_stay_masked():
    penalties = Penalties(VOCAB, CPU)
    penalties.join(Slot(0), (1, 2, 2), 1)
    logits = torch.full((1, VOCAB), -torch.inf)
    sampling = SamplingParams(max_tokens=1, repetition_penalty=0.5, frequency_penalty=-1.0)
    penalties.apply_(logits, torch.tensor([0]), [Slot(0)], [sampling])
    assert (logits == -torch.inf).all()


def member(slot: int, history=(1, 2), prompt_len: int = 2, choices=(0,), **changes) -> Joined:
    sampling = SamplingParams(max_tokens=99, temperature=0.0, **changes)
    return Joined(
        slot=Slot(slot),
        sampling=sampling,
        choices=choices,
        end_token_ids=(),
        prompt_len=prompt_len,
        history=tuple(history),
        blocks=(),
    )


def greedy_walk(sampler: Sampler, slot: int, first: int, steps: int) -> list[int]:
    logits = torch.arange(VOCAB, 0.0, -1.0)[None] / 10
    return [
        int(sampler.sample(logits, [SampleRow(slot=Slot(slot), choice=0, position=p)]).tokens)
        for p in range(first, first + steps)
    ]


def test_what_was_sampled_is_counted():
    sampler = Sampler(max_num_seqs=4, vocab_size=VOCAB, device=CPU)
    sampler.join(member(0, presence_penalty=2.0))
    assert greedy_walk(sampler, 0, 2, VOCAB) == list(range(VOCAB))


def test_a_sequence_that_joins_again_goes_on_as_if_it_had_stayed():
    changes: dict[str, Any] = {"frequency_penalty": 0.15, "repetition_penalty": 1.1}
    stayed = Sampler(max_num_seqs=4, vocab_size=VOCAB, device=CPU)
    stayed.join(member(0, **changes))
    whole = greedy_walk(stayed, 0, 2, 300)  # past the first capacity of a history
    moved = Sampler(max_num_seqs=4, vocab_size=VOCAB, device=CPU)
    moved.join(member(2, (1, 2, *whole[:100]), 2, **changes))
    assert greedy_walk(moved, 2, 102, 200) == whole[100:]


@pytest.mark.parametrize("num_slots", [1, 4, 5, 40])
def test_any_number_of_slots_keeps_its_own_counts(num_slots):
    sampler = Sampler(max_num_seqs=64, vocab_size=VOCAB, device=CPU)
    for slot in range(num_slots):
        outputs = range(slot % 9)
        sampler.join(member(slot, (11, *outputs), 1, presence_penalty=2.0))
    logits = (torch.arange(VOCAB, 0.0, -1.0)[None] / 10).repeat(num_slots, 1)
    for step in range(3):
        rows = [
            SampleRow(slot=Slot(slot), choice=0, position=1 + slot % 9 + step)
            for slot in range(num_slots)
        ]
        tokens = sampler.sample(logits, rows).tokens.tolist()
        assert tokens == [slot % 9 + step for slot in range(num_slots)]
    for slot in range(num_slots):
        sampler.leave(Slot(slot))


def test_the_first_tokens_of_several_choices_do_not_count_against_each_other():
    sampler = Sampler(max_num_seqs=4, vocab_size=VOCAB, device=CPU)
    sampler.join(member(0, choices=(0, 1, 2), presence_penalty=2.0))
    logits = (torch.arange(VOCAB, 0.0, -1.0)[None] / 10).repeat(3, 1)
    rows = [SampleRow(slot=Slot(0), choice=choice, position=2) for choice in range(3)]
    assert sampler.sample(logits, rows).tokens.tolist() == [0, 0, 0]
