"""A prefill node around the real scheduler for property tests: handoffs and ranks are fakes.

The world does what a node may do with the scheduler, in any order that a test picks, and checks
after every operation what must hold. A handoff may read its blocks until it is over, so their KV
is checked until then.
"""

import bisect
from collections import Counter
from dataclasses import dataclass

from pdserve.core.request import RequestKey, SamplingParams
from pdserve.engine.batch import Batch, Sampled
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from prefill_node.scheduler import PrefillScheduler, TokensComputed
from tests.fake_executor import FakeExecutor
from tests.fakes import FakeClock
from tests.oracle import FakeModel
from tests.pools import empty_blocks
from tests.prompts import VOCAB_SIZE, make_prompt

CLASS_BOUNDS = (8, 24)
OVERTAKE_S = 1.0


@dataclass(eq=False)
class Prefill:
    """One prompt that a decode node has asked for."""

    sequence: Sequence
    expected: tuple[int, ...]  # the first token of each choice
    num_computed: int = 0
    got: tuple[int, ...] | None = None
    aborted: bool = False

    @property
    def is_computed(self) -> bool:
        return self.got is not None


class World:
    """One node with its clock, prompts and ranks."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        num_slots: int = 8,
        max_num_batched_tokens: int = 16,
        depth: int = 1,
    ) -> None:
        self.depth = depth
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_slots = num_slots
        self.clock = FakeClock()
        self.model = FakeModel(VOCAB_SIZE)
        self.ledger = Ledger(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            enable_prefix_caching=True,
        )
        self.executor = FakeExecutor(
            self.model, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots
        )
        self.scheduler = PrefillScheduler(
            ledger=self.ledger,
            clock=self.clock,
            max_num_batched_tokens=max_num_batched_tokens,
            overtake_s=OVERTAKE_S,
        )
        self.prefills: list[Prefill] = []  # whose handoff is not over
        self.batches: list[Batch] = []
        self.started: list[Sequence] = []  # in order
        self.ended: list[Sequence] = []  # prompts that were computed, in order
        self._num_asked = 0

    # ---- what a test can do -----------------------------------------------------------------

    def ask(
        self,
        prompt_len: int,
        *,
        num_choices: int = 1,
        penalty: float = 0.0,
        num_alike: int = 0,
        cache_salt: bytes = b"",
        lane: int | None = None,
    ) -> Prefill:
        """A decode node asks for a prompt (``make_prompt``); ``lane`` None: that of its length."""
        number = self._num_asked
        self._num_asked += 1
        choices = tuple(range(num_choices))
        sampling = SamplingParams(max_tokens=9, presence_penalty=penalty, seed=number)
        tokens = make_prompt(number, prompt_len, num_alike=num_alike)
        history = self.model.history(tokens)
        prefill = Prefill(
            Sequence(
                key=RequestKey(f"r{number}", 0),
                choices=choices,
                sampling=sampling,
                prompt_len=prompt_len,
                token_ids=tokens,
                end_token_ids=(),
                max_len=prompt_len + 1,
                arrived_s=self.clock.now_s(),
                cache_salt=cache_salt,
                lane=bisect.bisect_right(CLASS_BOUNDS, prompt_len) if lane is None else lane,
            ),
            tuple(
                self.model.sample(history, sampling, c, prompt_len=prompt_len, end_token_ids=())
                for c in choices
            ),
        )
        self.prefills.append(prefill)
        self.scheduler.add(prefill.sequence)
        self.check()
        return prefill

    def plan(self) -> bool:
        """Plan steps until ``depth`` are in flight or nothing is to be done."""
        planned = False
        while self.executor.num_in_flight < self.depth:
            waiting = [p.sequence for p in self.prefills if self._is_waiting(p)]
            num_slots = self.ledger.num_free_slots
            planned_before = {p.sequence: p.sequence.num_planned for p in self.prefills}
            batch = self.scheduler.next_batch()
            self._check_starts(waiting, num_slots)
            self._check_shares(planned_before)
            if batch is None:
                break
            planned = True
            assert batch.num_tokens <= self.max_num_batched_tokens
            self.batches.append(batch)
            self.executor.submit(batch)
            self.check()
        self.act()
        return planned

    def apply(self) -> None:
        """Take in the oldest step's output."""
        batch, output = self.executor.output()
        self.scheduler.apply(batch, output)
        self.act()

    def step(self) -> bool:
        """One turn of a node's loop; False if there was nothing to do."""
        self.plan()
        if not self.executor.num_in_flight:
            return False
        self.apply()
        return True

    def abort(self, prefill: Prefill) -> None:
        """The decode node wants nothing more of it; its blocks may still be read."""
        prefill.aborted = True
        self.scheduler.remove(prefill.sequence)
        self.act()

    def end(self, prefill: Prefill) -> None:
        """The handoff is over: delivered, or failed and drained."""
        assert prefill.is_computed or prefill.aborted
        self.prefills.remove(prefill)
        self.scheduler.release(prefill.sequence)
        self.act()

    def finish(self) -> None:
        """Compute and deliver everything."""
        bound = 50 + 2 * sum(len(p.sequence.token_ids) for p in self.prefills)
        for _ in range(bound):
            stepped = self.step()
            for prefill in [p for p in self.prefills if p.is_computed or p.aborted]:
                self.end(prefill)
            self.clock.advance(0.1)
            if not stepped and not self.prefills:
                break
        else:
            raise AssertionError(f"not done after {bound} rounds")
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.scheduler.num_queued_tokens == 0
        assert self.ledger.pool.num_free == self.ledger.pool.num_blocks
        assert self.ledger.num_free_slots == self.num_slots
        assert self.ledger.num_draining_blocks == 0

    def act(self) -> None:
        """Take the scheduler's events as a node does, then check."""
        for event in self.scheduler.take_events():
            self._on_computed(event)
        self.check()

    # ---- what must hold ---------------------------------------------------------------------

    def check(self) -> None:
        """The invariants after any operation."""
        pool = self.ledger.pool
        pool.check()
        assert all(pool.num_owners(block) for block in self.executor.blocks_in_flight())
        held = Counter(block for p in self.prefills for block in p.sequence.blocks)
        draining = self.ledger.num_draining_blocks
        assert all(pool.num_owners(block) >= count for block, count in held.items())
        shared = [block for block, count in held.items() if count > 1]
        assert all(pool.cache.is_named(block) for block in shared), "two prompts write one block"
        num_held = pool.num_blocks - pool.num_free
        assert len(held) <= num_held <= len(held) + draining
        for prefill in self.prefills:
            sequence = prefill.sequence
            if prefill.num_computed:
                read = self.executor.read(sequence.blocks, prefill.num_computed)
                assert read.tokens() == sequence.token_ids[: prefill.num_computed]
        self.executor.poison(empty_blocks(pool))

    def place(self, sequence: Sequence) -> float:
        """A prompt's place in the queue: its arrival, later for each lane above the first."""
        return sequence.arrived_s + sequence.lane * OVERTAKE_S

    def _is_waiting(self, prefill: Prefill) -> bool:
        return not prefill.sequence.blocks and not prefill.aborted

    def _check_starts(self, waiting: list[Sequence], num_slots: int) -> None:
        """Nobody passed a prompt that had waited past its place; nothing that fits was left."""
        started = sorted((s for s in waiting if s.blocks), key=self.place)
        left = sorted((s for s in waiting if not s.blocks), key=self.place)
        self.started += started
        now_s = self.clock.now_s()
        stuck = [self.place(s) for s in left if now_s > self.place(s) + OVERTAKE_S]
        limit = min(stuck, default=float("inf"))
        assert all(self.place(s) <= limit for s in started), "passed one that waited too long"
        if num_slots > len(started):
            idle = [s for s in left if self.place(s) < limit]
            free = self.ledger.pool.num_free
            assert all(self.ledger.num_blocks_for(s.num_prompt) > free for s in idle), "idle"
        for sequence in started:
            assert len(sequence.blocks) == self.ledger.num_blocks_for(sequence.num_prompt)

    def _check_shares(self, planned_before: dict[Sequence, int]) -> None:
        """The whole budget is spent on what is not cached, in order of the prompts' places."""
        began = [p.sequence for p in self.prefills if p.sequence.blocks and not p.aborted]
        before = {s: max(planned_before[s], s.num_cached) for s in began}
        lengths = {s: s.num_planned - before[s] for s in began}
        wanted = sum(s.num_prompt - before[s] for s in began)
        assert sum(lengths.values()) == min(self.max_num_batched_tokens, wanted)
        served = max((self.place(s) for s, length in lengths.items() if length), default=0.0)
        for sequence in began:
            assert not sequence.num_unplanned_prompt or self.place(sequence) >= served

    def _on_computed(self, event: TokensComputed) -> None:
        (prefill,) = [p for p in self.prefills if p.sequence is event.sequence]
        assert not prefill.aborted
        assert event.num_tokens > prefill.num_computed
        prefill.num_computed = event.num_tokens
        is_last = event.num_tokens == event.sequence.num_prompt
        assert (event.first is not None) == is_last
        if event.first is not None:
            assert isinstance(event.first, Sampled)
            prefill.got = event.first.tokens
            assert prefill.got == prefill.expected
            self.ended.append(event.sequence)
