"""The ranks of a node for tests of schedulers: wrong plans and wrong KV are found, not computed.

Knows what real ranks rely on (``engine/batch.py``), not why a scheduler plans what it plans.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import (
    Batch,
    Carried,
    Chunk,
    Joined,
    Sampled,
    Scored,
    Slot,
    StepOutput,
)
from tests.oracle import FakeModel, History, logprobs_of, prompt_logprob_of


@dataclass(slots=True)
class _Resident:
    """What the ranks hold for one slot since its sequence joined."""

    joined: Joined
    table: list[BlockId]
    end: int | None = None  # position after its latest chunk
    has_sampled: bool = False  # the latest chunk sampled one token
    last_token: int | None = None
    counted: tuple[int, ...] = ()  # where sampling needs it: prompt and output so far


@dataclass(slots=True)
class _FakeStep:
    batch: Batch
    work: list[tuple[_Resident, Chunk, tuple[BlockId, ...]]]  # block table as of this step
    output: StepOutput | None = None  # None: not run yet


class FakeExecutor:
    """All ranks of one node, fed with batches; asserts every rule that real ranks rely on.

    KV is modelled as the token history of each position, so a position that was never written, was
    written for other tokens or was overwritten is found when it is read. ``submit`` checks the
    delta; the step's reads and writes happen in ``run_one`` or, at the latest, in ``output``.
    """

    def __init__(
        self, model: FakeModel, *, num_blocks: int, block_size: int, num_slots: int
    ) -> None:
        self.model = model
        self._block_size = block_size
        self._num_slots = num_slots
        self._kv: list[list[History | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._residents: dict[Slot, _Resident] = {}
        self._steps: deque[_FakeStep] = deque()
        self._next_step = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    def submit(self, batch: Batch) -> None:
        """Take the next step. Asserts that its delta fits what the ranks hold.

        Where they hold nothing another node, or a trial, may begin to count anew; the step without
        chunks is its last one.
        """
        assert batch.step == self._next_step or (batch.step == 0 and not self._residents)
        self._next_step = batch.step + 1
        for slot in batch.left:
            assert slot in self._residents, f"slot {slot} left, but nobody is there"
            del self._residents[slot]
        assert batch.chunks or not self._residents
        for joined in batch.joined:
            self._join(joined)
        for copy in batch.copies:
            assert copy.source != copy.destination
        slots = [chunk.slot for chunk in batch.chunks]
        assert len(set(slots)) == len(slots), "two chunks of one slot"
        assert {joined.slot for joined in batch.joined} <= set(slots), "joined before its chunk"
        self._steps.append(_FakeStep(batch, [self._plan(chunk) for chunk in batch.chunks]))

    def run_one(self) -> None:
        """Compute the oldest step that has not been computed, if there is one."""
        step = next((step for step in self._steps if step.output is None), None)
        if step is None:
            return
        for copy in step.batch.copies:
            self._kv[copy.destination] = list(self._kv[copy.source])
        masks = {mask.slot: mask.bits for mask in step.batch.masks}
        sampled = [self._compute(*work, masks.get(work[1].slot)) for work in step.work]
        scored = [
            scored_of(number, chunk, resident.joined)
            for number, (resident, chunk, _) in enumerate(step.work)
        ]
        step.output = StepOutput(
            step=step.batch.step,
            sampled=tuple(one for one in sampled if one is not None),
            scored=tuple(one for one in scored if one is not None),
        )

    def output(self) -> tuple[Batch, StepOutput]:
        """The oldest step and what it sampled; it is in flight no more."""
        if self._steps[0].output is None:
            self.run_one()
        step = self._steps.popleft()
        assert step.output is not None
        return step.batch, step.output

    def blocks_in_flight(self) -> set[BlockId]:
        """Every block that a step in flight reads, writes or copies."""
        tables = (table for step in self._steps for _, _, table in step.work)
        copies = (copy for step in self._steps for copy in step.batch.copies)
        return {b for table in tables for b in table}.union(
            *({copy.source, copy.destination} for copy in copies)
        )

    def write(self, blocks: Sequence[BlockId], start: int, histories: Iterable[History]) -> None:
        """KV of positions ``start ..`` arrives from another node."""
        for position, history in enumerate(histories, start):
            self._put(blocks, position, history)

    def poison(self, blocks: Iterable[BlockId]) -> None:
        """Forget what these blocks hold: to read them from now on is an error."""
        for block in blocks:
            self._kv[block] = [None] * self._block_size

    def read(self, blocks: Sequence[BlockId], num_tokens: int) -> History:
        """The history that positions [0, num_tokens) hold; asserts that it is one."""
        node = self.model.root
        for position in range(num_tokens):
            block, offset = divmod(position, self._block_size)
            found = self._kv[blocks[block]][offset]
            assert found is not None, f"position {position}: read before it was written"
            assert found.parent is node, f"position {position}: KV of another history"
            node = found
        return node

    def _put(self, blocks: Sequence[BlockId], position: int, history: History) -> None:
        block, offset = divmod(position, self._block_size)
        self._kv[blocks[block]][offset] = history

    def _join(self, joined: Joined) -> None:
        assert 0 <= joined.slot < self._num_slots
        assert joined.slot not in self._residents, f"slot {joined.slot} joined, but is taken"
        self._check_new(joined.blocks, [])
        assert bool(joined.history) == joined.sampling.needs_history
        self._residents[joined.slot] = _Resident(
            joined, list(joined.blocks), counted=joined.history
        )

    def _check_new(self, blocks: Sequence[BlockId], table: Sequence[BlockId]) -> None:
        assert len({*blocks, *table}) == len(blocks) + len(table), "a block twice in one table"
        assert all(0 <= block < len(self._kv) for block in blocks)

    def _plan(self, chunk: Chunk) -> tuple[_Resident, Chunk, tuple[BlockId, ...]]:
        assert chunk.slot in self._residents, f"a chunk for slot {chunk.slot}, where nobody is"
        resident = self._residents[chunk.slot]
        self._check_new(chunk.new_blocks, resident.table)
        resident.table += chunk.new_blocks
        stop = chunk.start + chunk.length
        assert chunk.length >= 1
        assert chunk.start >= 0
        assert stop <= len(resident.table) * self._block_size, "the blocks do not hold the chunk"
        assert resident.end in (None, chunk.start), "a gap or an overlap between chunks"
        if isinstance(chunk.tokens, Carried):
            assert resident.has_sampled, "Carried, but the chunk before sampled nothing"
        assert chunk.num_samples <= len(resident.joined.choices)
        self._check_alone(chunk, resident)
        resident.end = stop
        resident.has_sampled = chunk.num_samples == 1
        return resident, chunk, tuple(resident.table)

    def _check_alone(self, chunk: Chunk, resident: _Resident) -> None:
        """Nobody else on the ranks has a block that this chunk writes."""
        first = chunk.start // self._block_size
        last = (chunk.start + chunk.length - 1) // self._block_size
        written = set(resident.table[first : last + 1])
        for other in self._residents.values():
            assert other is resident or written.isdisjoint(other.table), "writes a shared block"

    def _compute(
        self,
        resident: _Resident,
        chunk: Chunk,
        table: tuple[BlockId, ...],
        mask: bytes | None,
    ) -> Sampled | None:
        node = self.read(table, chunk.start)
        tokens = (resident.last_token,) if isinstance(chunk.tokens, Carried) else chunk.tokens
        for position, token in enumerate(tokens, chunk.start):
            assert token is not None
            node = node.then(token)
            self._put(table, position, node)
        if not chunk.num_samples:
            return None
        joined = resident.joined
        if joined.sampling.needs_history:
            assert list(resident.counted) == node.tokens(), "penalties count other tokens"
        sampled = tuple(
            self.model.sample(
                node,
                joined.sampling,
                choice,
                prompt_len=joined.prompt_len,
                end_token_ids=joined.end_token_ids,
                mask=mask,
            )
            for choice in joined.choices[: chunk.num_samples]
        )
        resident.last_token = sampled[0]
        resident.counted += sampled[:1] if joined.sampling.needs_history else ()
        logprobs = [logprobs_of(token, joined.sampling) for token in sampled]
        return Sampled(tokens=sampled, logprobs=tuple(chain.from_iterable(logprobs)))


def scored_of(number: int, chunk: Chunk, joined: Joined) -> Scored | None:
    """What is told of the prompt tokens in a chunk; ranks rely on all chunks since the first."""
    if joined.sampling.prompt_logprobs is None or isinstance(chunk.tokens, Carried):
        return None
    start, stop = max(1, chunk.start), min(chunk.start + chunk.length, joined.prompt_len)
    if start >= stop:
        return None
    tokens = chunk.tokens[start - chunk.start : stop - chunk.start]
    logprobs = tuple(prompt_logprob_of(token, joined.sampling) for token in tokens)
    return Scored(chunk=number, start=start, logprobs=logprobs)
