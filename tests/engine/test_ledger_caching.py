"""Which blocks a new sequence is given of what others have left, and when blocks become known."""

import pytest

from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from tests.engine.ledgers import make_ledger, make_sequence, plan


def begun(ledger: Ledger, prompt_len: int = 10, spare_tokens: int = 0) -> Sequence:
    """A sequence that has a slot and begins with what is cached."""
    sequence = make_sequence(prompt_len)
    assert ledger.begin(sequence, prompt_len + spare_tokens)
    ledger.enter(sequence)
    return sequence


def compute(ledger: Ledger, sequence: Sequence) -> None:
    ledger.retire(plan(ledger, sequence, sequence.num_unplanned_prompt, num_samples=1))


def known(ledger: Ledger, prompt_len: int = 40) -> int:
    """How many tokens of a prompt a new sequence would find."""
    probe = make_sequence(prompt_len)
    assert ledger.begin(probe, probe.num_prompt)
    ledger.release(probe)
    return probe.num_cached


def test_full_blocks_are_known_once_their_step_has_retired():
    ledger = make_ledger(20)
    sequence = begun(ledger, 10)
    step = plan(ledger, sequence, 10)
    assert known(ledger) == 0
    ledger.retire(step)
    assert known(ledger) == 8


def test_blocks_stay_known_when_their_sequence_is_over_and_count_as_free():
    ledger = make_ledger(20)
    sequence = begun(ledger, 10)
    compute(ledger, sequence)
    ledger.release(sequence)
    assert ledger.is_empty
    again = begun(ledger, 10, spare_tokens=5)
    assert (again.num_cached, again.num_planned, len(again.blocks)) == (8, 8, 4)
    assert again.num_unplanned_prompt == 2
    assert ledger.pool.num_free == 16


def test_all_kv_of_a_handoff_is_known_when_it_is_in_and_none_before():
    ledger = make_ledger(20)
    sequence = make_sequence(10)
    assert ledger.begin(sequence, 20)
    ledger.begin_transfer(sequence)
    assert known(ledger) == 0
    ledger.received(sequence)
    assert known(ledger) == 8


def test_a_handoff_that_ends_otherwise_leaves_nothing_known():
    ledger = make_ledger(20)
    sequence = make_sequence(10)
    assert ledger.begin(sequence, 20)
    ledger.begin_transfer(sequence)
    ledger.release(sequence)
    ledger.end_transfer(sequence)
    assert known(ledger) == 0
    assert ledger.pool.cache.num_named == 0


def test_output_tokens_are_known_with_their_blocks():
    ledger = make_ledger(20)
    sequence = begun(ledger, 7, spare_tokens=10)
    compute(ledger, sequence)
    for token in (7, 8, 9, 10):  # as a longer prompt of these tests goes on
        sequence.token_ids.append(token)
        ledger.retire(plan(ledger, sequence, 1, num_samples=1))
    assert known(ledger) == 8
    sequence.token_ids.append(11)
    ledger.retire(plan(ledger, sequence, 1, num_samples=1))
    assert known(ledger) == 12


def test_a_token_that_was_sampled_after_the_end_makes_no_block_known():
    ledger = make_ledger(20)
    sequence = begun(ledger, 6, spare_tokens=10)
    steps = [plan(ledger, sequence, 6, num_samples=1)]
    steps += [plan(ledger, sequence, 1, num_samples=1) for _ in range(2)]  # positions 6 and 7
    ledger.retire(steps[0])
    sequence.token_ids.append(6)
    ledger.release(sequence)
    for step in steps[1:]:
        ledger.retire(step)
    assert ledger.pool.cache.num_named == 1
    assert ledger.is_empty


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (3, True), (4, False)])
def test_shared_blocks_need_no_room_and_some_may_be_kept_free(spare: int, fits: bool):
    ledger = make_ledger(8)
    compute(ledger, begun(ledger, 12))  # three blocks, five are left
    sequence = make_sequence(16)
    assert ledger.begin(sequence, 20, spare=spare) is fits  # those and two more
    assert ledger.pool.num_free == (3 if fits else 5)


def test_idle_blocks_that_are_shared_are_no_free_ones_any_more():
    ledger = make_ledger(4)
    first = begun(ledger, 12)
    compute(ledger, first)
    ledger.release(first)
    assert ledger.pool.num_free == 4
    sequence = make_sequence(16)
    assert not ledger.begin(sequence, 20)
    assert ledger.begin(sequence, 16)
    assert (sequence.num_cached, ledger.pool.num_free) == (12, 0)


def test_without_prefix_caching_nothing_is_known_or_counted():
    ledger = Ledger(num_blocks=20, block_size=4, num_slots=4, enable_prefix_caching=False)
    compute(ledger, begun(ledger, 10))
    assert known(ledger) == 0
    assert (ledger.num_queried_tokens, ledger.num_hit_tokens) == (0, 0)


def test_what_was_looked_for_and_found_is_counted():
    ledger = make_ledger(20)
    compute(ledger, begun(ledger, 10))
    begun(ledger, 10)
    assert (ledger.num_queried_tokens, ledger.num_hit_tokens) == (20, 8)
    assert not ledger.begin(make_sequence(10), 1000)
    assert (ledger.num_queried_tokens, ledger.num_hit_tokens) == (20, 8)
