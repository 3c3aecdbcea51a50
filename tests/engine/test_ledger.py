"""Who holds blocks and slots, what the ranks are told, and when blocks are free again."""

import pytest

from pdserve.engine.batch import Carried
from tests.engine.ledgers import entered, forked, make_ledger, make_sequence, plan

# ---- blocks ---------------------------------------------------------------------------------


def test_reserving_gives_blocks_for_so_many_tokens_in_all():
    ledger, sequence = make_ledger(), make_sequence()
    for num_tokens, num_blocks in ((1, 1), (4, 1), (5, 2), (3, 2), (12, 3)):
        assert ledger.reserve(sequence, num_tokens)
        assert len(sequence.blocks) == num_blocks


def test_what_does_not_fit_changes_nothing():
    ledger, sequence = make_ledger(3), make_sequence()
    assert ledger.reserve(sequence, 5)
    assert not ledger.reserve(sequence, 13)
    assert (len(sequence.blocks), ledger.pool.num_free) == (2, 1)


def test_trimming_takes_back_what_no_step_has_touched():
    ledger = make_ledger()
    sequence = entered(ledger, 5, num_tokens=20)
    ledger.trim(sequence, 5)
    assert (len(sequence.blocks), ledger.pool.num_free) == (2, 8)
    plan(ledger, sequence, 5)
    with pytest.raises(AssertionError):
        ledger.trim(sequence, 4)


# ---- what the ranks are told ----------------------------------------------------------------


def test_a_join_carries_the_whole_table_and_later_chunks_only_what_is_new():
    ledger = make_ledger()
    sequence = entered(ledger, 10, num_tokens=8)
    first = plan(ledger, sequence, 4)
    assert [joined.blocks for joined in first.joined] == [tuple(sequence.blocks)]
    assert first.chunks[0].new_blocks == ()
    assert ledger.reserve(sequence, 16)
    second = plan(ledger, sequence, 6)
    assert second.joined == ()
    assert second.chunks[0].new_blocks == tuple(sequence.blocks[2:])
    assert plan(ledger, sequence, 1).chunks[0].new_blocks == ()


def test_a_sequence_joins_with_its_first_chunk_and_with_all_that_it_has_then():
    ledger = make_ledger()
    idle, busy = entered(ledger, num_tokens=4), entered(ledger)
    assert [joined.slot for joined in plan(ledger, busy, 4).joined] == [busy.slot]
    assert ledger.reserve(idle, 10)
    later = plan(ledger, idle, 4)
    assert [joined.blocks for joined in later.joined] == [tuple(idle.blocks)]
    assert later.chunks[0].new_blocks == ()
    assert plan(ledger, idle, 4).joined == ()


def test_a_sequence_that_waits_for_its_first_chunk_leaves_unheard_and_its_slot_is_joined_once():
    ledger = make_ledger(num_slots=2)
    waiting, busy = entered(ledger), entered(ledger)
    plan(ledger, busy, 4)
    ledger.leave(waiting)
    next_one = entered(ledger, 4)
    batch = plan(ledger, next_one, 4)
    assert (batch.left, [joined.slot for joined in batch.joined]) == ((), [next_one.slot])


def test_a_fork_that_joins_late_finds_its_copy_made_before_its_parents_block_was_free_again():
    ledger = make_ledger()
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    early, late = forked(ledger, parent, 0), forked(ledger, parent, 1)
    source = parent.blocks[2]
    ledger.release(parent)
    early.token_ids.append(5)
    first = plan(ledger, early, 1)
    assert [joined.slot for joined in first.joined] == [early.slot]
    assert [copy.destination for copy in first.copies] == [early.blocks[2], late.blocks[2]]
    assert ledger.pool.num_owners(source) == 2
    ledger.retire(first)
    assert ledger.pool.num_owners(source) == 0
    late.token_ids.append(6)
    second = plan(ledger, late, 1)
    assert [joined.blocks for joined in second.joined] == [tuple(late.blocks)]
    assert second.copies == ()


def test_a_token_that_is_not_known_yet_is_carried_on_the_device():
    ledger = make_ledger()
    sequence = entered(ledger, 4, num_tokens=12)
    assert plan(ledger, sequence, 4, num_samples=1).chunks[0].tokens == (0, 1, 2, 3)
    assert isinstance(plan(ledger, sequence, 1, num_samples=1).chunks[0].tokens, Carried)
    sequence.token_ids += [7, 8]
    chunk = plan(ledger, sequence, 1, num_samples=1).chunks[0]
    assert (chunk.start, chunk.tokens, chunk.length) == (5, (8,), 1)


def test_tokens_so_far_are_sent_only_where_penalties_need_them():
    ledger = make_ledger()
    plain, penalised = make_sequence(4), make_sequence(4, presence_penalty=0.5)
    for sequence in (plain, penalised):
        ledger.reserve(sequence, 4)
        ledger.enter(sequence)
    joined = [*plan(ledger, plain, 4).joined, *plan(ledger, penalised, 2).joined]
    assert [j.history for j in joined] == [(), (0, 1, 2, 3)]


def test_steps_are_numbered_and_nothing_is_no_step():
    ledger = make_ledger()
    sequence = entered(ledger)
    assert ledger.batch([], []) is None
    assert [plan(ledger, sequence, 2).step for _ in range(3)] == [0, 1, 2]


def test_a_slot_that_is_left_can_be_joined_in_the_same_step():
    ledger = make_ledger(num_slots=1)
    first = entered(ledger)
    plan(ledger, first, 4)
    ledger.leave(first)
    second = entered(ledger)
    batch = plan(ledger, second, 4)
    assert batch.left == (0,)
    assert [joined.slot for joined in batch.joined] == [0]


def test_the_ranks_never_hear_of_a_sequence_that_left_before_its_first_step():
    ledger = make_ledger()
    ledger.leave(entered(ledger))
    batch = plan(ledger, entered(ledger), 4)
    assert (len(batch.joined), batch.left) == (1, ())


def test_what_the_ranks_were_not_told_waits_for_a_step_that_has_work():
    ledger = make_ledger()
    gone = entered(ledger)
    plan(ledger, gone, 4)
    ledger.leave(gone)
    assert ledger.batch([], []) is None
    assert plan(ledger, entered(ledger), 4).left == (0,)
    assert plan(ledger, entered(ledger), 4).left == ()


# ---- release --------------------------------------------------------------------------------


def test_a_released_sequence_keeps_its_blocks_until_its_last_step_has_retired():
    ledger = make_ledger()
    sequence = entered(ledger, 10)
    steps = [plan(ledger, sequence, 4), plan(ledger, sequence, 4)]
    ledger.release(sequence)
    assert ledger.num_free_slots == 4
    assert [ledger.pool.num_free, ledger.num_draining_blocks] == [7, 3]
    ledger.retire(steps[0])
    assert [ledger.pool.num_free, ledger.num_draining_blocks] == [7, 3]
    assert list(ledger.retire(steps[1])) == [sequence]
    assert [ledger.pool.num_free, ledger.num_draining_blocks] == [10, 0]


@pytest.mark.parametrize("transfer_ends_first", [True, False])
def test_blocks_are_free_after_the_last_step_and_the_handoff(transfer_ends_first: bool):
    ledger = make_ledger()
    sequence = entered(ledger)
    ledger.begin_transfer(sequence)
    batch = plan(ledger, sequence, 4)
    ledger.release(sequence)
    ends = [lambda: ledger.end_transfer(sequence), lambda: ledger.retire(batch)]
    for end in ends if transfer_ends_first else reversed(ends):
        assert ledger.pool.num_free == 7
        end()
    assert ledger.pool.num_free == 10


def test_to_release_or_to_drain_again_does_nothing():
    ledger = make_ledger()
    sequence = entered(ledger)
    for _ in range(3):
        ledger.release(sequence)
        ledger.end_transfer(sequence)
    assert (ledger.pool.num_free, ledger.num_free_slots, ledger.num_draining_blocks) == (10, 4, 0)


def test_a_step_that_is_not_the_oldest_can_not_retire():
    ledger = make_ledger()
    sequence = entered(ledger)
    plan(ledger, sequence, 2)
    second = plan(ledger, sequence, 2)
    with pytest.raises(AssertionError, match="step 1 retired, 0 expected"):
        ledger.retire(second)
