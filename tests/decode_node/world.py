"""A decode node around the real scheduler for property tests: requests, legs and ranks are fakes.

The world does what a node may do with the scheduler, in any order that a test picks, and checks
after every operation what must hold. KV and first tokens of legs come from the oracle; a leg that
was dropped goes on spoiling its blocks until it is drained, as a late write would.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from decode_node.events import Admitted, Event, Forked, NewToken, Replaced
from decode_node.scheduler import DecodeLimits, DecodeScheduler
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import FinishReason, RequestKey
from pdserve.engine.batch import Batch, BlockCopy, Sampled
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from tests.decode_node.asked import Asked, Leg, make_asked
from tests.decode_node.rules import check_budgets, check_victims
from tests.fake_executor import FakeExecutor
from tests.fakes import FakeClock
from tests.oracle import FakeModel
from tests.pools import empty_blocks
from tests.prompts import VOCAB_SIZE

LIMITS = DecodeLimits(
    max_num_seqs=8,
    max_num_batched_tokens=32,
    local_prefill_tokens=8,
    fallback_chunk=4,
    headroom_tokens=4,
    overtake_s=1.0,
)
MAX_FAILURES = 2  # then a request falls back to local prefill


def make_world(num_blocks: int = 100, *, depth: int = 2, **limits: float) -> "World":
    """A world with small limits, some of them changed."""
    return World(replace(LIMITS, **limits), num_blocks=num_blocks, depth=depth)  # type: ignore[arg-type]


class World:
    """One node with its clock, requests, legs and ranks."""

    def __init__(
        self, limits: DecodeLimits, *, num_blocks: int, block_size: int = 4, depth: int = 1
    ) -> None:
        self.limits = limits
        self.depth = depth
        self.clock = FakeClock()
        self.model = FakeModel(VOCAB_SIZE)
        num_slots = limits.max_num_seqs
        self.ledger = Ledger(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            enable_prefix_caching=True,
        )
        self.executor = FakeExecutor(
            self.model, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots
        )
        self.scheduler = DecodeScheduler(ledger=self.ledger, clock=self.clock, limits=limits)
        self.asked: dict[RequestKey, Asked] = {}
        self.legs: list[Leg] = []
        self.admitted: list[Sequence] = []  # in order
        self.replaced: list[Sequence] = []  # in order
        self.batches: list[Batch] = []
        self._sequences: list[Sequence] = []  # all that may hold blocks
        self._budgeted: dict[Sequence, bool] = {}  # of prompts that are prefilled here

    # ---- what a test can do -----------------------------------------------------------------

    def ask(
        self,
        prompt_len: int,
        max_tokens: int,
        *,
        route: str = "local",
        admit: bool = True,
        **wishes: Any,
    ) -> Asked:
        """A request arrives; ``wishes`` are those of ``make_asked``."""
        number, now_s = len(self.asked), self.clock.now_s()
        asked = make_asked(self.model, number, now_s, route, prompt_len, max_tokens, **wishes)
        sequence = asked.living[0]
        assert self.scheduler.fits(sequence)
        self.asked[asked.key] = asked
        self._sequences.append(sequence)
        self.scheduler.add(sequence)
        if admit:
            self.scheduler.admit()
            self.act()
        return asked

    def plan(self) -> bool:
        """Plan steps until ``depth`` are in flight or nothing is to be done, then act."""
        planned = False
        while self.executor.num_in_flight < self.depth:
            computing, not_started = self._computing(), self._not_started()
            batch = self.scheduler.next_batch()
            check_victims(computing, not_started, still_not_started=self._not_started())
            if batch is None:
                break
            planned = True
            self.batches.append(batch)
            check_budgets(batch, self._sequences, self._budgeted, self.limits)
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

    def step_until(self, done: Callable[[], object]) -> None:
        """Take turns, without anything new from outside, until ``done()``."""
        for _ in range(100):
            if done():
                return
            self.step()
            self.clock.advance(0.001)
        raise AssertionError("not within 100 steps")

    @property
    def copies(self) -> list[BlockCopy]:
        """All copies that were planned so far."""
        return [copy for batch in self.batches for copy in batch.copies]

    def bring_first_tokens(self, leg: Leg) -> None:
        """The prefill node has sent the leg's first tokens."""
        assert not leg.has_first_tokens
        assert not leg.dropped
        sequence = leg.sequence
        history = self.model.history(sequence.token_ids[: sequence.num_prompt])
        tokens = tuple(
            self.model.sample(
                history,
                sequence.sampling,
                choice,
                prompt_len=sequence.prompt_len,
                end_token_ids=sequence.end_token_ids,
            )
            for choice in sequence.choices
        )
        leg.has_first_tokens = True
        self.scheduler.first_tokens(sequence, Sampled(tokens=tokens))
        if sequence.over:
            self._drop(sequence)
        elif leg.is_ready:
            self._join(leg)
        self.act()

    def push(self, leg: Leg, num_tokens: int) -> None:
        """KV of the leg's next tokens arrives; with the last of it the transfer is over."""
        assert not leg.is_ready
        assert not leg.dropped
        sequence = leg.sequence
        nodes = self.model.history(sequence.token_ids[: sequence.num_prompt]).nodes()
        arriving = nodes[leg.num_pushed : leg.num_pushed + num_tokens]
        self.executor.write(leg.blocks, leg.num_pushed, arriving)
        leg.num_pushed += len(arriving)
        if leg.num_pushed == sequence.num_prompt:
            leg.is_ready = True
            self.ledger.received(sequence)
            if leg.has_first_tokens:
                self._join(leg)
        self.act()

    def fail(self, leg: Leg) -> None:
        """The prefill node or the link could not do it."""
        leg.asked.num_failures += 1
        new = self.scheduler.start_again(leg.sequence)
        self._live(leg.asked, new)
        self._drop(leg.sequence)
        self.act()

    def drain(self, leg: Leg) -> None:
        """Nothing of a dropped leg moves any more; its last write came just now."""
        assert leg.dropped
        self.executor.poison(self._written(leg))
        self.legs.remove(leg)
        self.ledger.end_transfer(leg.sequence)
        self.act()

    def abort(self, asked: Asked) -> None:
        """The router wants nothing more of the request."""
        asked.aborted = True
        for leg in [leg for leg in self.legs if leg.asked is asked]:
            self.scheduler.remove(leg.sequence)
        for sequence in list(asked.living.values()):
            self.scheduler.remove(sequence)
        for leg in [leg for leg in self.legs if leg.asked is asked]:
            self._drop(leg.sequence)
        self.act()

    def end_choice(self, asked: Asked, choice: int) -> None:
        """The router wants nothing more of a choice that has parted from the others."""
        sequence = asked.living.pop(choice)
        assert sequence.choices == (choice,)
        asked.ended[choice] = FinishReason.ABORT
        self.scheduler.remove(sequence)
        legs = [leg for leg in self.legs if leg.asked is asked and leg.sequence.over]
        for ended in {sequence, *(leg.sequence for leg in legs)}:
            self._drop(ended)
        self.act()

    def finish(self, *, newest_first: bool = False, one_at_a_time: bool = False) -> None:
        """Let all that is on its way come, until every request has ended."""
        lengths = [len(sequence.token_ids) for sequence in self._sequences]
        total = sum(len(t) for a in self.asked.values() for t in a.expected.values())
        bound = 200 + 20 * (total + sum(lengths))
        for _ in range(bound):
            legs = self.legs[::-1] if newest_first else self.legs[:]
            for leg in legs[:1] if one_at_a_time else legs:
                self._advance(leg)
            stepped = self.step()
            self.clock.advance(0.1)
            if not stepped and not self.legs and all(map(self._is_done, self.asked.values())):
                break
        else:
            raise AssertionError(f"not done after {bound} rounds")
        self.check_all_done()

    # ---- what must hold ---------------------------------------------------------------------

    def check(self) -> None:
        """The invariants after any operation."""
        pool = self.ledger.pool
        pool.check()
        in_flight = self.executor.blocks_in_flight()
        moving = [leg for leg in self.legs if not leg.is_ready]
        in_transfer = {block for leg in moving for block in leg.blocks}
        assert all(pool.num_owners(block) for block in in_flight | in_transfer), "freed in use"
        written = {block for leg in moving for block in self._written(leg)}
        assert not any(map(pool.cache.is_named, written)), "named while it is written"
        self._sequences = [s for s in self._sequences if s.blocks or not s.released]
        holders: dict[BlockId, list[Sequence]] = {}
        for sequence in self._sequences:
            for block in sequence.blocks:
                holders.setdefault(block, []).append(sequence)
        for block, sequences in holders.items():
            assert pool.num_owners(block) >= len(sequences)
            assert block not in written or len(sequences) == 1, "shared while it is written"
        slots = [s.slot for s in self._sequences if s.slot is not None]
        assert (
            len(set(slots)) == len(slots) == self.limits.max_num_seqs - self.ledger.num_free_slots
        )
        draining = sum(len(s.blocks) for s in self._sequences if s.released)
        assert self.ledger.num_draining_blocks == draining
        self.executor.poison(empty_blocks(pool))

    def check_all_done(self) -> None:
        """Every request has its right answer and nothing is held."""
        for asked in self.asked.values():
            assert self._is_done(asked)
            for choice, tokens in asked.got.items():
                is_cut = asked.aborted or asked.ended[choice] is FinishReason.ABORT
                assert is_cut or tokens == asked.expected[choice]
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert self.scheduler.num_queued_tokens == 0
        assert self.ledger.pool.num_free == self.ledger.pool.num_blocks
        assert self.ledger.num_free_slots == self.limits.max_num_seqs
        assert self.ledger.num_draining_blocks == 0

    def act(self) -> None:
        """Act on the scheduler's events as a node does, then check."""
        while events := self.scheduler.take_events():
            for event in events:
                self._on_event(event)
        self.check()

    # ---- private ----------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case Admitted(sequence=sequence):
                asked = self.asked[sequence.key]
                if not asked.aborted:
                    self._prefill(asked, sequence)
            case Forked(parent=parent, children=children):
                self._live(self.asked[parent.key], children)
            case Replaced(old=old, new=new):
                self.replaced.append(old)
                self._live(self.asked[old.key], new)
                self._drop(old)
            case NewToken():
                self._on_token(self.asked[event.sequence.key], event)

    def _prefill(self, asked: Asked, sequence: Sequence) -> None:
        wanted = min(sequence.num_prompt + self.limits.headroom_tokens, sequence.max_len)
        assert not sequence.over, "asked to prefill a sequence that is over"
        assert len(sequence.blocks) >= self.ledger.num_blocks_for(wanted), "not reserved"
        self.admitted.append(sequence)
        if asked.route == "remote" and asked.num_failures < MAX_FAILURES:
            self.ledger.begin_transfer(sequence)
            blocks = sequence.blocks[: self.ledger.num_blocks_for(sequence.num_prompt)]
            self.legs.append(Leg(asked, sequence, tuple(blocks), num_pushed=sequence.num_cached))
            return
        self._budgeted[sequence] = asked.route == "local"
        self.scheduler.prefill_locally(sequence, budgeted=self._budgeted[sequence])

    def _on_token(self, asked: Asked, event: NewToken) -> None:
        (choice,) = event.sequence.choices
        if asked.aborted:
            return
        got, expected = asked.got[choice], asked.expected[choice]
        assert choice not in asked.ended, "a token after the last one"
        assert event.index == len(got), "a token twice or none"
        assert event.token_id == expected[len(got)], "a wrong token"
        got.append(event.token_id)
        assert (event.finish_reason is not None) == (len(got) == len(expected))
        if event.finish_reason is not None:
            is_end = event.token_id in event.sequence.end_token_ids
            assert event.sequence.constraint is not None or event.finish_reason is (
                FinishReason.STOP if is_end else FinishReason.LENGTH
            )
            asked.ended[choice] = event.finish_reason
            del asked.living[choice]
            self._drop(event.sequence)

    def _live(self, asked: Asked, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._sequences.append(sequence)
            asked.living.update(dict.fromkeys(sequence.choices, sequence))
            if asked.aborted:
                self.scheduler.remove(sequence)

    def _written(self, leg: Leg) -> tuple[BlockId, ...]:
        """Its blocks without those that were cached."""
        return leg.blocks[leg.sequence.num_cached // self.ledger.block_size :]

    def _join(self, leg: Leg) -> None:
        self.legs.remove(leg)
        self.scheduler.join(leg.sequence)

    def _drop(self, sequence: Sequence) -> None:
        for leg in [leg for leg in self.legs if leg.sequence is sequence]:
            if leg.is_ready:
                self.legs.remove(leg)
            leg.dropped = True

    def _advance(self, leg: Leg) -> None:
        if leg.dropped:
            self.drain(leg)
        elif not leg.has_first_tokens:
            self.bring_first_tokens(leg)
        elif not leg.is_ready:
            self.push(leg, leg.sequence.num_prompt)

    def _is_done(self, asked: Asked) -> bool:
        return asked.aborted or len(asked.ended) == len(asked.expected)

    def _computing(self) -> list[Sequence]:
        return [s for s in self._sequences if s.slot is not None]

    def _not_started(self) -> list[Sequence]:
        """Reserved, and no token known of what is computed elsewhere."""
        started = {leg.sequence for leg in self.legs if leg.has_first_tokens}
        reserved = [s for s in self._sequences if s.blocks and s.slot is None and not s.over]
        return [s for s in reserved if s not in started]
