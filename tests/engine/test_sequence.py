"""What a sequence counts, when it ends and what its next life keeps."""

from typing import Any

import pytest

from pdserve.core.request import FinishReason, RequestKey, SamplingParams
from pdserve.engine.sequence import Sequence


def make_sequence(**changes) -> Sequence:
    settings: dict[str, Any] = {
        "key": RequestKey("r", 2),
        "choices": (0, 1),
        "sampling": SamplingParams(max_tokens=4, seed=7),
        "prompt_len": 3,
        "token_ids": [1, 2, 3],
        "end_token_ids": (9, 8),
        "max_len": 7,
        "arrived_s": 1.5,
    }
    return Sequence(**(settings | changes))


def test_tokens_of_an_earlier_attempt_are_computed_like_prompt_but_counted_as_output():
    sequence = make_sequence(token_ids=[1, 2, 3, 4, 5])
    assert sequence.num_prompt == 5
    assert sequence.num_outputs == 2


def test_a_prompt_counts_as_unplanned_until_steps_are_planned_for_it():
    sequence = make_sequence()
    counts = []
    for planned in (0, 2, 3, 5):
        sequence.num_planned = planned
        counts.append(sequence.num_unplanned_prompt)
    assert counts == [3, 1, 0, 0]


@pytest.mark.parametrize(("num_planned", "expected"), [(0, 3), (2, 3), (3, 4), (5, 6)])
def test_tokens_that_steps_in_flight_will_sample_are_expected(num_planned: int, expected: int):
    sequence = make_sequence()
    sequence.num_planned = num_planned
    assert sequence.num_expected == expected


def test_it_ends_with_an_end_token_or_at_its_length():
    sequence = make_sequence()
    assert [sequence.append(t) for t in (4, 5, 6)] == [None, None, None]
    assert sequence.append(7) is FinishReason.LENGTH
    assert make_sequence().append(8) is FinishReason.STOP


def test_an_end_token_at_the_length_limit_is_a_stop():
    assert make_sequence(max_len=4).append(9) is FinishReason.STOP


def test_the_next_life_has_the_same_tokens_and_name_and_nothing_cached():
    old = make_sequence(choices=(1,))
    old.append(4)
    old.num_planned, old.over = 4, True
    new = old.again()
    assert (new.key, new.choices, new.sampling, new.arrived_s) == (
        old.key,
        old.choices,
        old.sampling,
        old.arrived_s,
    )
    assert (new.token_ids, new.prompt_len, new.num_prompt) == ([1, 2, 3, 4], 3, 4)
    assert (new.end_token_ids, new.max_len) == (old.end_token_ids, old.max_len)
    assert (new.blocks, new.num_planned, new.slot) == ([], 0, None)
    assert [new.over, new.released, new.in_transfer] == [False, False, False]
    new.append(5)
    assert old.token_ids == [1, 2, 3, 4]


def test_logprobs_of_the_prompt_are_asked_again_until_there_is_a_first_token():
    asks = SamplingParams(max_tokens=4, seed=7, prompt_logprobs=2)
    sequence = make_sequence(choices=(1,), sampling=asks)
    assert sequence.again().sampling == asks
    sequence.append(4)
    assert sequence.again().sampling == SamplingParams(max_tokens=4, seed=7)
    fork = make_sequence(sampling=asks).forked(1)
    assert fork.sampling == SamplingParams(max_tokens=4, seed=7)


def test_a_fork_begins_with_the_prompt_alone():
    parent = make_sequence(token_ids=[1, 2, 3, 4])
    parent.append(6)
    child = parent.forked(1)
    child.append(5)
    assert (child.choices, child.token_ids, child.num_prompt) == ((1,), [1, 2, 3, 4, 5], 4)
    assert parent.token_ids == [1, 2, 3, 4, 6]
    assert child.num_outputs == 2


def test_sequences_are_themselves_and_nobody_else():
    assert make_sequence() != make_sequence()
    assert len({make_sequence(), make_sequence()}) == 2
