"""Forks share full blocks; the partly filled last one is copied, and held while it is."""

from tests.engine.ledgers import entered, forked, make_ledger, plan


def test_a_fork_of_a_fork_copies_what_is_there_already_and_leaves_nothing_behind():
    ledger = make_ledger()
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    child = forked(ledger, parent)
    grandchild = forked(ledger, child)
    grandchild.token_ids.append(5)
    batch = plan(ledger, grandchild, 1)
    assert [(copy.source, copy.destination) for copy in batch.copies] == [
        (parent.blocks[2], child.blocks[2]),
        (parent.blocks[2], grandchild.blocks[2]),
    ]
    ledger.retire(batch)
    for sequence in (parent, child, grandchild):
        ledger.release(sequence)
    assert ledger.is_empty


def test_forks_of_forks_that_end_before_their_copies_are_planned_leave_nothing_behind():
    ledger = make_ledger()
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    child = forked(ledger, parent)
    grandchild = forked(ledger, child)
    for sequence in (parent, child, grandchild):
        ledger.release(sequence)
    assert ledger.is_empty


def test_a_fork_shares_full_blocks_and_copies_the_partly_filled_one():
    ledger = make_ledger()
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    child = forked(ledger, parent)
    assert child.blocks[:2] == parent.blocks[:2]
    assert child.blocks[2] not in parent.blocks
    assert child.num_planned == 10
    child.token_ids.append(5)
    batch = plan(ledger, child, 1)
    assert [(c.source, c.destination) for c in batch.copies] == [
        (parent.blocks[2], child.blocks[2])
    ]
    assert plan(ledger, child, 1).copies == ()


def test_a_prompt_that_fills_its_blocks_is_forked_without_a_copy():
    ledger = make_ledger(2)
    parent = entered(ledger, 8)
    ledger.retire(plan(ledger, parent, 8))
    assert forked(ledger, parent).blocks == parent.blocks


def test_without_a_free_block_for_the_copy_nothing_is_forked():
    ledger = make_ledger(3)
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    child = parent.forked(1)
    assert not ledger.fork(parent, child)
    assert child.blocks == []
    assert all(ledger.pool.num_owners(block) == 1 for block in parent.blocks)


def test_both_ends_of_a_copy_stay_owned_until_its_step_has_retired():
    ledger = make_ledger()
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    child = forked(ledger, parent)
    source, destination = parent.blocks[2], child.blocks[2]
    ledger.release(parent)
    assert ledger.pool.num_owners(source) == 1
    batch = plan(ledger, entered(ledger, 4), 4)
    ledger.release(child)
    assert ledger.pool.num_owners(source) == ledger.pool.num_owners(destination) == 1
    ledger.retire(batch)
    assert ledger.pool.num_free == 9


def test_a_fork_that_is_over_before_its_copy_was_planned_is_never_copied():
    ledger = make_ledger()
    parent = entered(ledger, 10)
    ledger.retire(plan(ledger, parent, 10))
    kept, dropped = forked(ledger, parent, 0), forked(ledger, parent, 1)
    ledger.release(parent)
    ledger.release(dropped)
    batch = plan(ledger, entered(ledger, 4), 4)
    assert [copy.destination for copy in batch.copies] == [kept.blocks[2]]
    ledger.release(kept)
    ledger.retire(batch)
    assert ledger.pool.num_free == 9
