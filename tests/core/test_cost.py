"""The cost formulas: what a prompt costs does not depend on how it is cut, beyond its steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.cost import DecodeCost, LinkCost, PrefillCost

PREFILL = PrefillCost(a=0.01, b=0.001, c=1e-6)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=8), st.integers(0, 4000))
def test_chunks_cost_what_the_prompt_costs_but_for_the_steps(chunks: list[int], start: int) -> None:
    total, position = 0.0, start
    for length in chunks:
        total += PREFILL.chunk_s(length, position)
        position += length
    whole = PREFILL.chunk_s(sum(chunks), start)
    assert total == pytest.approx(whole + (len(chunks) - 1) * PREFILL.a)


def test_a_prompt_takes_as_many_steps_as_it_has_chunks() -> None:
    cost = PrefillCost(a=1.0, b=0.0, c=0.0)
    assert [cost.prompt_s(n, 100) for n in (1, 100, 101, 300)] == [1, 1, 2, 3]
    assert [cost.prompt_s(n, 0) for n in (0, 1, 300)] == [0, 1, 1]


def test_what_is_cached_is_attended_to_but_not_computed() -> None:
    cost = PrefillCost(a=0.0, b=0.0, c=1.0)
    assert cost.prompt_s(10, 100, start=0) == 50
    assert cost.prompt_s(10, 100, start=90) == 950


def test_a_queue_costs_what_its_chunks_cost_as_prompts() -> None:
    assert PREFILL.queue_s(0, 100) == PREFILL.queue_s(0, 0) == 0
    assert PREFILL.queue_s(250, 0) == pytest.approx(PREFILL.chunk_s(250))
    assert PREFILL.queue_s(250, 100) == pytest.approx(
        2 * PREFILL.chunk_s(100) + PREFILL.chunk_s(50)
    )


def test_decode_costs_count_sequences_and_their_context() -> None:
    cost = DecodeCost(a=1.0, b=0.1, c=0.001)
    assert cost.step_s(3, 500) == pytest.approx(1.8)
    assert cost.marginal_s(3, 500) == pytest.approx(0.8)


def test_nothing_to_move_takes_no_time() -> None:
    cost = LinkCost(latency_s=0.5, s_per_byte=0.001, token_bytes=10)
    assert cost.tokens_s(0) == 0
    assert cost.tokens_s(100) == pytest.approx(1.5)
