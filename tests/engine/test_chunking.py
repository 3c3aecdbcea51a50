"""How a step's budget is shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.request import RequestKey, SamplingParams
from pdserve.engine.chunking import share_budget
from pdserve.engine.sequence import Sequence


def make_sequence(prompt_len: int, num_planned: int = 0) -> Sequence:
    sequence = Sequence(
        key=RequestKey("r", 0),
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        prompt_len=prompt_len,
        token_ids=[0] * prompt_len,
        end_token_ids=(),
        max_len=prompt_len + 1,
        arrived_s=0.0,
    )
    sequence.num_planned = num_planned
    return sequence


@pytest.mark.parametrize(
    ("prompt_lens", "budget", "shares"),
    [
        ([5], 10, [5]),
        ([5], 5, [5]),
        ([5], 3, [3]),
        ([2, 3, 9, 4], 10, [2, 3, 5]),
        ([2, 3], 0, []),
        ([2, 3], -1, []),
        ([], 4, []),
        ([4, 4], 4, [4]),
    ],
)
def test_the_first_takes_what_it_needs_and_the_next_what_is_left(
    prompt_lens: list[int], budget: int, shares: list[int]
):
    sequences = [make_sequence(length) for length in prompt_lens]
    assert list(share_budget(sequences, budget)) == list(zip(sequences, shares, strict=False))


def test_what_is_planned_already_takes_no_share():
    done, half, fresh = make_sequence(4, 4), make_sequence(4, 2), make_sequence(4)
    assert list(share_budget([done, half, fresh], 5)) == [(half, 2), (fresh, 3)]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=8),
    budget=st.integers(0, 60),
)
def test_nothing_is_left_over_while_anybody_wants_it(prompts: list[tuple[int, int]], budget: int):
    sequences = [make_sequence(length, min(planned, length)) for length, planned in prompts]
    wanted = sum(sequence.num_unplanned_prompt for sequence in sequences)
    shares = list(share_budget(sequences, budget))
    assert sum(length for _, length in shares) == min(wanted, budget)
    assert all(0 < length <= s.num_unplanned_prompt for s, length in shares)
    assert [s for s, _ in shares] == [s for s in sequences if s in dict(shares)]
