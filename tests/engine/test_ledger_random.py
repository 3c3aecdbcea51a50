"""Any order of what schedulers and nodes do with a ledger.

No block in use is free, none is lost, and what the prefix cache gives holds what it is said to.
"""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import Batch
from pdserve.engine.sequence import Sequence
from tests.engine.ledgers import BLOCK_SIZE, make_ledger, make_sequence
from tests.prompts import make_prompt

Written = tuple[bytes, tuple[int, ...]]  # KV of one position: of this salt, after these tokens


@dataclass(eq=False)
class _Step:
    batch: Batch
    sequences: list[Sequence]
    tables: list[list[BlockId]]  # as of this step
    touched: set[BlockId]


class LedgerMachine(RuleBasedStateMachine):
    """A model of what each position of each block holds; steps write when they retire."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = make_ledger(12, num_slots=3)
        self.sequences: list[Sequence] = []
        self.steps: list[_Step] = []
        self.holds: dict[tuple[BlockId, int], Written] = {}

    @rule(
        prompt_len=st.integers(1, 20),
        num_alike=st.sampled_from([0, 6, 20]),
        salt=st.sampled_from([b"", b"", b"salt"]),
        spare=st.integers(0, 10),
    )
    def begin(self, prompt_len, num_alike, salt, spare):
        sequence = make_sequence(prompt_len)
        sequence.token_ids = make_prompt(len(self.sequences), prompt_len, num_alike=num_alike)
        sequence.cache_salt = salt
        free = self.ledger.pool.num_free
        if not self.ledger.begin(sequence, prompt_len + spare, spare=2):
            assert self.ledger.pool.num_free == free
            return
        assert self.ledger.pool.num_free >= 2
        assert sequence.num_cached < prompt_len
        for position in range(sequence.num_cached):
            assert self.holds[self._place(sequence.blocks, position)] == at(sequence, position)
        self._forget(sequence.blocks[sequence.num_named :])
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
        computable = st.sampled_from(self._computable())
        picked = data.draw(st.lists(computable, min_size=1, max_size=3, unique=True))
        chunks = [self.ledger.chunk(s, min(length, s.num_unplanned_prompt), 0) for s in picked]
        touched = {block for s in picked for block in s.blocks}
        batch = self.ledger.batch(chunks, picked)
        assert batch is not None
        touched |= {b for copy in batch.copies for b in (copy.source, copy.destination)}
        self.steps.append(_Step(batch, picked, [list(s.blocks) for s in picked], touched))

    @precondition(lambda self: self.steps)
    @rule()
    def retire(self):
        step = self.steps.pop(0)
        for copy in step.batch.copies:
            for offset in range(BLOCK_SIZE):
                if (held := self.holds.get((copy.source, offset))) is not None:
                    self.holds[copy.destination, offset] = held
        for sequence, table, chunk in zip(
            step.sequences, step.tables, step.batch.chunks, strict=True
        ):
            for position in range(chunk.start, chunk.start + chunk.length):
                self._write(table, position, sequence)
        self.ledger.retire(step.batch)

    @precondition(lambda self: self.ledger.num_free_slots and self._forkable())
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self._forkable()))
        child = parent.forked(0)
        if self.ledger.fork(parent, child):
            self.ledger.enter(child)
            self._forget(child.blocks[child.num_named :])
            self.sequences.append(child)

    @precondition(lambda self: self._living())
    @rule(data=st.data(), begin=st.booleans())
    def transfer(self, data, begin):
        sequence = data.draw(st.sampled_from(self._living()))
        if begin and not sequence.in_transfer:
            self.ledger.begin_transfer(sequence)

    @precondition(lambda self: self._receivable())
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def receive(self, data, num_tokens):
        sequence = data.draw(st.sampled_from(self._receivable()))
        stop = min(sequence.num_cached + num_tokens, sequence.num_prompt)
        for position in range(sequence.num_cached, stop):
            self._write(sequence.blocks, position, sequence)
        if stop == sequence.num_prompt:
            sequence.num_planned = stop
            self.ledger.received(sequence)

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
        in_flight = {block for step in self.steps for block in step.touched}
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

    def _place(self, table: list[BlockId], position: int) -> tuple[BlockId, int]:
        return table[position // BLOCK_SIZE], position % BLOCK_SIZE

    def _write(self, table: list[BlockId], position: int, sequence: Sequence) -> None:
        place = self._place(table, position)
        assert not self.ledger.pool.cache.is_named(place[0]), "a named block is written"
        self.holds[place] = at(sequence, position)

    def _forget(self, blocks: list[BlockId]) -> None:
        """Whoever was given these may have left anything in them."""
        self.holds = {place: held for place, held in self.holds.items() if place[0] not in blocks}

    def _receivable(self) -> list[Sequence]:
        """Nobody computes these, and some of their KV is not there."""
        idle = [s for s in self._living() if s.in_transfer and not s.num_in_flight]
        return [s for s in idle if s.slot is None and s.num_planned == s.num_cached]

    def _living(self) -> list[Sequence]:
        return [s for s in self.sequences if not s.over]

    def _computable(self) -> list[Sequence]:
        return [s for s in self._living() if s.slot is not None and s.num_unplanned_prompt]

    def _forkable(self) -> list[Sequence]:
        return [s for s in self._living() if not s.num_unplanned_prompt and not s.num_in_flight]


def at(sequence: Sequence, position: int) -> Written:
    return sequence.cache_salt, tuple(sequence.token_ids[: position + 1])


TestAnyOrder = LedgerMachine.TestCase
TestAnyOrder.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
