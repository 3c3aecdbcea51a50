"""Who holds blocks and slots, what the ranks are told, and when blocks are free again."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import RequestKey, SamplingParams
from pdserve.engine.batch import Batch, Carried
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence

BLOCK_SIZE = 4


def make_ledger(num_blocks: int = 10, num_slots: int = 4) -> Ledger:
    return Ledger(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_slots=num_slots,
        enable_prefix_caching=True,
    )


def make_sequence(prompt_len: int = 10, **sampling) -> Sequence:
    return Sequence(
        key=RequestKey("r", 0),
        choices=(0,),
        sampling=SamplingParams(max_tokens=20, **sampling),
        prompt_len=prompt_len,
        token_ids=list(range(prompt_len)),
        end_token_ids=(99,),
        max_len=prompt_len + 20,
        arrived_s=0.0,
    )


def entered(ledger: Ledger, prompt_len: int = 10, num_tokens: int | None = None) -> Sequence:
    """A sequence with blocks and a slot that no step has touched."""
    sequence = make_sequence(prompt_len)
    assert ledger.reserve(sequence, num_tokens or prompt_len)
    ledger.enter(sequence)
    return sequence


def plan(ledger: Ledger, sequence: Sequence, length: int, num_samples: int = 0) -> Batch:
    batch = ledger.batch([ledger.chunk(sequence, length, num_samples)], [sequence])
    assert batch is not None
    return batch


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


def test_a_sequence_that_joins_without_a_chunk_is_not_told_twice():
    ledger = make_ledger()
    idle, busy = entered(ledger), entered(ledger)
    assert len(plan(ledger, busy, 4).joined) == 2
    later = plan(ledger, idle, 4)
    assert later.joined == ()
    assert later.chunks[0].new_blocks == ()


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
    joined = plan(ledger, plain, 4).joined
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


# ---- forks ----------------------------------------------------------------------------------


def forked(ledger: Ledger, parent: Sequence, choice: int = 1) -> Sequence:
    child = parent.forked(choice)
    assert ledger.fork(parent, child)
    ledger.enter(child)
    return child


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


# ---- everything at once ---------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """Any order of what schedulers and nodes do; blocks in use are never free, none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = make_ledger(12, num_slots=3)
        self.sequences: list[Sequence] = []
        self.steps: list[tuple[Batch, set[BlockId]]] = []

    @rule(prompt_len=st.integers(1, 20), spare=st.integers(0, 10))
    def reserve(self, prompt_len, spare):
        sequence = make_sequence(prompt_len)
        if self.ledger.reserve(sequence, prompt_len + spare):
            self.sequences.append(sequence)

    @precondition(lambda self: self.ledger.num_free_slots and self._living())
    @rule(data=st.data())
    def enter(self, data):
        sequence = data.draw(st.sampled_from(self._living()))
        if sequence.slot is None:
            self.ledger.enter(sequence)

    @precondition(lambda self: self._computable())
    @rule(data=st.data(), length=st.integers(1, 8))
    def plan(self, data, length):
        picked = data.draw(st.lists(st.sampled_from(self._computable()), min_size=1, unique=True))
        chunks = [self.ledger.chunk(s, min(length, s.num_unplanned_prompt), 0) for s in picked]
        touched = {block for s in picked for block in s.blocks}
        batch = self.ledger.batch(chunks, picked)
        assert batch is not None
        touched |= {b for copy in batch.copies for b in (copy.source, copy.destination)}
        self.steps.append((batch, touched))

    @precondition(lambda self: self.steps)
    @rule()
    def retire(self):
        self.ledger.retire(self.steps.pop(0)[0])

    @precondition(lambda self: self.ledger.num_free_slots and self._forkable())
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self._forkable()))
        child = parent.forked(0)
        if self.ledger.fork(parent, child):
            self.ledger.enter(child)
            self.sequences.append(child)

    @precondition(lambda self: self._living())
    @rule(data=st.data(), begin=st.booleans())
    def transfer(self, data, begin):
        sequence = data.draw(st.sampled_from(self._living()))
        if begin and not sequence.in_transfer:
            self.ledger.begin_transfer(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_transfer(self, data):
        self.ledger.end_transfer(data.draw(st.sampled_from(self.sequences)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data):
        self.ledger.release(data.draw(st.sampled_from(self.sequences)))

    def check_invariants(self, *args, **kwargs):
        super().check_invariants(*args, **kwargs)
        pool = self.ledger.pool
        pool.check()
        in_flight = {block for _, touched in self.steps for block in touched}
        in_transfer = {b for s in self.sequences if s.in_transfer for b in s.blocks}
        assert all(pool.num_owners(block) for block in in_flight | in_transfer)
        slots = [s.slot for s in self.sequences if s.slot is not None]
        assert len(set(slots)) == len(slots) == 3 - self.ledger.num_free_slots
        draining = sum(len(s.blocks) for s in self.sequences if s.released)
        assert draining == self.ledger.num_draining_blocks

    def teardown(self):
        for sequence in self.sequences:
            self.ledger.release(sequence)
            self.ledger.end_transfer(sequence)
        while self.steps:
            self.retire()
        assert self.ledger.pool.num_free == 12
        assert self.ledger.num_free_slots == 3
        assert self.ledger.num_draining_blocks == 0

    def _living(self) -> list[Sequence]:
        return [s for s in self.sequences if not s.over]

    def _computable(self) -> list[Sequence]:
        return [s for s in self._living() if s.slot is not None and s.num_unplanned_prompt]

    def _forkable(self) -> list[Sequence]:
        return [s for s in self._living() if not s.num_unplanned_prompt and not s.num_in_flight]


TestAnyOrder = LedgerMachine.TestCase
TestAnyOrder.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
