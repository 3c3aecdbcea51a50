"""When the loop of a node plans, and what it waits for."""

import asyncio
from collections import deque

import pytest

from kv_transfer.commands import KvEvent
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.batch import Batch, StepOutput
from pdserve.engine.ledger import Ledger
from pdserve.rank.idle_trials import IdleTrials
from pdserve.rank.ranks import Arrivals, Step
from pdserve.rank.step_loop import run_steps
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import TrialLimits
from tests.fakes import FakeClock, fake_output

TURNS = 10  # of the event loop, in which everything that can go on does


class Planned:
    """A scheduler that plans what it is given, one step after the other."""

    def __init__(self) -> None:
        self.waiting: deque[Batch] = deque()
        self.applied: list[int] = []
        self.waits_for_owner = False

    def next_batch(self) -> Batch | None:
        return self.waiting.popleft() if self.waiting else None

    def apply(self, batch: Batch, output: StepOutput) -> None:
        assert output == fake_output(batch)
        self.applied.append(batch.step)


class HeldRanks:
    """Ranks whose outputs come when the test says so."""

    def __init__(self) -> None:
        self.num_blocks = 1
        self.addresses: tuple[str, ...] = ()
        self.pids: tuple[int, ...] = ()
        self.arrivals = Arrivals(step_timeout_s=60.0)
        self.in_flight: deque[Batch] = deque()

    @property
    def layout(self) -> KvLayout:
        raise NotImplementedError

    @property
    def failed(self) -> asyncio.Future[RankError]:
        return self.arrivals.failed

    def kv(self, command: object) -> None:
        raise NotImplementedError

    async def next_event(self) -> tuple[int, KvEvent]:
        raise NotImplementedError

    async def close(self) -> None:
        self.arrivals.fail(RankError("closed"))

    def submit(self, batch: Batch) -> Step:
        self.in_flight.append(batch)
        return self.arrivals.expect(batch)

    def finish_one(self) -> None:
        self.arrivals.output(fake_output(self.in_flight.popleft()))


class WatchedMeter(StepMeter):
    """Notes which steps it was told of, how long they took, and what flew then."""

    def __init__(self, ranks: HeldRanks) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []
        self.in_flight: list[list[int]] = []
        self._ranks = ranks

    def observe(self, batch: Batch, duration_s: float, device_s: float | None = None) -> None:
        super().observe(batch, duration_s, device_s)
        self.seen.append((batch.step, duration_s))
        self.in_flight.append([b.step for b in self._ranks.in_flight])


class Loop:
    """A loop that runs, with its scheduler and its ranks. ``async with`` ends it."""

    def __init__(self, depth: int) -> None:
        self.scheduler = Planned()
        self.ranks = HeldRanks()
        self.clock = FakeClock()
        self.num_pauses = 0
        self.in_flight_when_told: list[list[int]] = []  # at each result
        self.meter = WatchedMeter(self.ranks)
        self._arrivals = asyncio.Event()
        self._depth = depth

    async def __aenter__(self) -> "Loop":
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def bring(self, *batches: Batch) -> None:
        """Something arrives: work, or nothing that could be planned."""
        self.scheduler.waiting.extend(batches)
        self._arrivals.set()
        await self.settle()

    async def finish_one(self) -> None:
        self.ranks.finish_one()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def _run(self) -> None:
        clock, meter = self.clock, self.meter
        ledger = Ledger(num_blocks=1, block_size=1, num_slots=1, enable_prefix_caching=False)
        limits = TrialLimits(
            chunk_len=1, max_len=1, max_num_seqs=1, max_num_batched_tokens=1, decodes=False
        )
        steps = run_steps(
            self.scheduler,
            self.ranks,
            depth=self._depth,
            arrivals=self._arrivals,
            clock=clock,
            meter=meter,
            trials=IdleTrials(ledger=ledger, limits=limits, idle_s=None, meter=meter, clock=clock),
        )
        async for submitted_s in steps:
            self.num_pauses += 1
            if submitted_s is not None:
                self.in_flight_when_told.append([b.step for b in self.ranks.in_flight])


def batch(step: int) -> Batch:
    return Batch(step=step, chunks=())


@pytest.mark.parametrize(("depth", "num_in_flight"), [(1, 1), (2, 2), (3, 3)])
async def test_what_arrives_while_steps_fly_is_planned_at_once_up_to_the_depth(
    depth: int, num_in_flight: int
) -> None:
    async with Loop(depth) as loop:
        for step in range(5):
            await loop.bring(batch(step))
        assert [b.step for b in loop.ranks.in_flight] == list(range(num_in_flight))


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_every_step_is_taken_in_its_order_however_things_arrive(depth: int) -> None:
    async with Loop(depth) as loop:
        await loop.bring(batch(0))
        await loop.bring()
        await loop.bring(batch(1), batch(2))
        await loop.finish_one()
        await loop.bring()
        await loop.bring(batch(3))
        while loop.ranks.in_flight:
            await loop.finish_one()
        assert loop.scheduler.applied == [0, 1, 2, 3]


async def test_a_loop_that_waits_for_a_step_sleeps() -> None:
    async with Loop(2) as loop:
        await loop.bring(batch(0))
        await loop.settle()
        num_pauses = loop.num_pauses
        await loop.settle()
        assert loop.num_pauses == num_pauses
        await loop.bring()
        assert loop.num_pauses == num_pauses + 1


@pytest.mark.parametrize(("waits", "in_flight"), [(False, [1, 2]), (True, [1])])
async def test_the_next_step_goes_out_before_a_result_is_told_unless_the_scheduler_waits(
    waits: bool, in_flight: list[int]
) -> None:
    async with Loop(2) as loop:
        loop.scheduler.waits_for_owner = waits
        await loop.bring(batch(0), batch(1), batch(2))
        await loop.finish_one()
        assert loop.in_flight_when_told == [in_flight]
        assert [b.step for b in loop.ranks.in_flight] == [1, 2]


async def test_each_step_is_measured_once_and_when_the_next_has_gone_out() -> None:
    """From the end of the one before, or from when it was submitted after a pause."""
    async with Loop(2) as loop:
        await loop.bring(batch(0), batch(1), batch(2))
        loop.clock.advance(2.0)
        await loop.finish_one()
        assert loop.meter.seen == [(0, 2.0)]
        assert loop.meter.in_flight == [[1, 2]]
        loop.clock.advance(3.0)
        await loop.finish_one()
        loop.clock.advance(4.0)
        await loop.finish_one()
        loop.clock.advance(100.0)
        await loop.bring(batch(3))
        loop.clock.advance(1.0)
        await loop.finish_one()
        assert loop.meter.seen == [(0, 2.0), (1, 3.0), (2, 4.0), (3, 1.0)]


async def test_steps_that_end_together_are_both_taken() -> None:
    async with Loop(2) as loop:
        await loop.bring(batch(0), batch(1))
        loop.ranks.finish_one()
        loop.ranks.finish_one()
        await loop.bring(batch(2))
        await loop.finish_one()
        assert loop.scheduler.applied == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 2])
async def test_ranks_that_are_lost_end_the_loop_whatever_it_waits_for(depth: int) -> None:
    async with Loop(depth) as loop:
        await loop.bring(batch(0))
        loop.ranks.arrivals.fail(RankError("lost"))
        with pytest.raises(RankError, match="lost"):
            await loop.task
