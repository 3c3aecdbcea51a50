"""An idle node runs trials: they mend its costs, keep nobody waiting and leave nothing behind."""

import asyncio

import pytest

from pdserve.core.errors import RankError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.prefix_hash import PrefixHash, extend_hashes
from pdserve.engine.batch import Batch
from pdserve.engine.ledger import Ledger
from pdserve.rank.idle_trials import LONGEST_FACTOR, IdleTrials
from pdserve.rank.ranks import Arrivals, Step
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import TrialLimits
from tests.engine.ledgers import BLOCK_SIZE, entered, make_ledger, plan
from tests.fake_executor import FakeExecutor
from tests.fakes import FakeClock
from tests.oracle import FakeModel
from tests.pools import empty_blocks

NUM_BLOCKS, NUM_SLOTS = 40, 4
PATIENCE_S = 10.0


class PacedRanks:
    """Ranks whose steps take ``pace`` seconds a token of a fake clock, and real time none."""

    def __init__(self, ledger: Ledger, clock: FakeClock) -> None:
        self.pace = 1.0
        self.num_blocks = NUM_BLOCKS
        self.addresses: tuple[str, ...] = ()
        self.pids: tuple[int, ...] = ()
        self.batches: list[Batch] = []
        self.at_step: dict[int, asyncio.Event] = {}  # what arrives while that step runs
        self._ledger = ledger
        self._clock = clock
        self._arrivals = Arrivals(step_timeout_s=60.0)
        self._executor = FakeExecutor(
            FakeModel(97), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS
        )

    @property
    def layout(self) -> KvLayout:
        raise NotImplementedError

    @property
    def failed(self) -> asyncio.Future[RankError]:
        return self._arrivals.failed

    def submit(self, batch: Batch) -> Step:
        step = self._arrivals.expect(batch)
        self.batches.append(batch)
        self._executor.submit(batch)
        asyncio.get_running_loop().call_soon(self._finish, batch)
        return step

    def kv(self, command: object) -> None:
        raise NotImplementedError

    async def next_event(self):
        raise NotImplementedError

    async def close(self) -> None:
        self._arrivals.fail(RankError("closed"))

    def _finish(self, batch: Batch) -> None:
        self._clock.advance(self.pace * batch.num_tokens)
        _, output = self._executor.output()
        self._ledger.pool.check()
        if (event := self.at_step.get(len(self.batches))) is not None:
            event.set()
        self._arrivals.output(output)


class IdleNode:
    """What ``IdleTrials`` sees of a node."""

    def __init__(self, *, decodes: bool = True, idle_s: float | None = 0.001) -> None:
        self.clock = FakeClock()
        self.ledger = make_ledger(num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)
        self.ranks = PacedRanks(self.ledger, self.clock)
        self.meter = StepMeter()
        self.arrivals = asyncio.Event()
        limits = TrialLimits(
            chunk_len=48, max_len=100, max_num_seqs=4, max_num_batched_tokens=64, decodes=decodes
        )
        self.trials = IdleTrials(
            ledger=self.ledger,
            limits=limits,
            idle_s=idle_s,
            meter=self.meter,
            clock=self.clock,
        )
        self._limits = limits

    def measured(self, pace: float) -> None:
        """Its start was measured on a machine of that pace, whole chunks included."""
        for batches in self._limits.trials(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS):
            for batch in batches:
                self.meter.observe(batch, pace * batch.num_tokens)

    async def rest(self, *, has_worked: bool = False) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.trials.rest(self.arrivals, self.ranks, has_worked=has_worked)
        self.ledger.pool.check()

    @property
    def chunk_s(self) -> float:
        cost = self.meter.costs().prefill
        assert cost is not None
        return cost.chunk_s(48)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("pace", [0.1, 3.0])
async def test_costs_of_all_sizes_follow_the_pace_that_short_steps_show(
    decodes: bool, pace: float
) -> None:
    node = IdleNode(decodes=decodes)
    node.measured(1.0)
    assert node.chunk_s == pytest.approx(48.0, rel=0.01)
    node.ranks.pace = pace
    await node.rest()
    assert node.chunk_s == pytest.approx(48.0 * pace, rel=0.01)
    decode = node.meter.costs().decode
    assert (decode is not None) == decodes
    assert decode is None or decode.step_s(1, 20) == pytest.approx(pace, rel=0.01)


async def test_no_trial_step_is_as_long_as_a_whole_chunk() -> None:
    node = IdleNode()
    await node.rest()
    assert max(batch.num_tokens for batch in node.ranks.batches) == 16


async def test_a_pace_that_has_hardly_changed_changes_nothing() -> None:
    node = IdleNode()
    node.measured(1.0)
    before = node.meter.costs()
    node.ranks.pace = 1.1
    await node.rest()
    assert node.ranks.batches
    assert node.meter.costs() == before


@pytest.mark.parametrize("step", range(1, 17))
async def test_no_trial_step_begins_after_something_has_arrived(step: int) -> None:
    node = IdleNode()
    node.measured(1.0)
    before = node.meter.costs()
    node.ranks.pace = 0.1
    node.ranks.at_step[step] = node.arrivals
    await node.rest()
    assert len(node.ranks.batches) == step
    assert node.ledger.is_empty
    assert node.ledger.num_free_slots == NUM_SLOTS
    assert node.meter.costs() == before
    # And what arrived runs at once: the ranks hold nothing that would be in its way.
    sequence = entered(node.ledger)
    node.ranks.submit(plan(node.ledger, sequence, 10, 1))


async def test_nothing_is_tried_while_something_holds_blocks() -> None:
    node = IdleNode()
    sequence = entered(node.ledger)
    node.ledger.begin_transfer(sequence)
    node.ledger.release(sequence)
    await node.rest()
    assert not node.ranks.batches
    node.ledger.end_transfer(sequence)
    await node.rest()
    assert node.ranks.batches


async def test_no_round_is_ever_run_where_the_file_says_so() -> None:
    node = IdleNode(idle_s=None)
    resting = asyncio.ensure_future(node.rest())
    for _ in range(10):
        await asyncio.sleep(0)
    node.arrivals.set()
    await resting
    assert not node.ranks.batches


async def test_the_prefix_cache_keeps_what_it_has_and_gets_nothing() -> None:
    node = IdleNode()
    sequence = entered(node.ledger)
    batch = plan(node.ledger, sequence, 10, 1)
    await node.ranks.submit(batch).output()
    node.ledger.retire(batch)
    node.ledger.release(sequence)
    names: list[PrefixHash] = []
    extend_hashes(names, list(range(10)), BLOCK_SIZE, b"")
    cache = node.ledger.pool.cache
    known = cache.find(names)
    assert len(known) == 2
    for _ in range(3):
        await node.rest()
    assert cache.find(names) == known
    assert cache.num_named == 2
    assert len(empty_blocks(node.ledger.pool)) == NUM_BLOCKS - 2
    assert node.ledger.num_queried_tokens == 0


async def test_rounds_without_news_come_more_and_more_seldom() -> None:
    node = IdleNode()
    node.measured(1.0)
    for factor in (2, 4, 8, 16, LONGEST_FACTOR):
        await node.rest()
        assert node.trials._factor == factor
    await node.rest(has_worked=True)
    assert node.trials._factor == 2
    node.ranks.pace = 5.0
    await node.rest()
    assert node.trials._factor == 1


async def test_lost_ranks_end_the_rest_with_their_error() -> None:
    node = IdleNode()
    await node.ranks.close()
    with pytest.raises(RankError, match="closed"):
        await node.rest()
