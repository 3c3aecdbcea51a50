"""Trial steps of a node that has nothing to do, so that its costs stay true.

A node that policies keep away from gets no requests, and would go for ever by what it measured on
a machine that was busy then. So an idle node runs a *round* of trials from time to time: twice a
short prompt and twice a quarter of a chunk, on a decode node with a few decode steps each. They are
sequences like any other, whose KV nobody will find; they run one step at a time, and none begins
when something has arrived: a request waits for the rest of one short step at most. A round that is
interrupted teaches nothing. After a round without news the node waits twice as long for the next
one, up to LONGEST_FACTOR times as long as at first.

Owns when rounds are and what they run; what they teach is the meter's (``CostFit.mend``).
"""

import asyncio
import itertools
import logging

from pdserve.core.clock import Clock
from pdserve.core.node import NodeSpec
from pdserve.core.request import RequestKey
from pdserve.engine.batch import Batch
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from pdserve.rank.ranks import Ranks
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import GREEDY, TrialLimits, trial_limits

NUM_REPEATS = 2
LONGEST_FACTOR = 16

logger = logging.getLogger(__name__)


class IdleTrials:
    """The trials of one node; ``ledger`` is its scheduler's. ``idle_s`` None: there are none."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        limits: TrialLimits,
        idle_s: float | None,
        meter: StepMeter,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._idle_s = idle_s
        self._meter = meter
        self._clock = clock
        self._factor = 1  # of the pause before the next round
        self._numbers = itertools.count()

    @classmethod
    def of(cls, spec: NodeSpec, ledger: Ledger, meter: StepMeter, clock: Clock) -> "IdleTrials":
        """Those that a node's section of the cluster file asks for."""
        return cls(
            ledger=ledger,
            limits=trial_limits(spec),
            idle_s=spec.pool.remeasure_idle_s,
            meter=meter,
            clock=clock,
        )

    async def rest(self, arrivals: asyncio.Event, ranks: Ranks, *, has_worked: bool) -> None:
        """Wait for ``arrivals``, or until it is time for a round, and run that. No step is in
        flight.

        ``has_worked``: steps have run since the last call. Raises RankError when the ranks are
        lost.
        """
        if has_worked:
            self._factor = 1
        if not await self._arrive(arrivals) and self._ledger.is_empty:  # else a handoff is at work
            await self._run_round(arrivals, ranks)

    async def _arrive(self, arrivals: asyncio.Event) -> bool:
        """False: nothing did until it was time for a round."""
        try:
            async with asyncio.timeout(
                None if self._idle_s is None else self._idle_s * self._factor
            ):
                await arrivals.wait()
        except TimeoutError:
            return False
        return True

    async def _run_round(self, arrivals: asyncio.Event, ranks: Ranks) -> None:
        short, quarter, _ = self._limits.lengths(self._capacity)
        trials: list[tuple[Batch, float]] = []
        for prompt_len in (short, quarter) * NUM_REPEATS:
            trials += await self._run_life(prompt_len, arrivals, ranks)
            if arrivals.is_set():
                return
        changed = self._meter.mend(trials)
        self._factor = 1 if changed else min(2 * self._factor, LONGEST_FACTOR)
        if changed:
            told = ", ".join(f"{kind} takes {factor:.2f} times" for kind, factor in changed.items())
            logger.info("measured while idle: %s what was known", told)

    async def _run_life(
        self, prompt_len: int, arrivals: asyncio.Event, ranks: Ranks
    ) -> list[tuple[Batch, float]]:
        """One sequence from its first step to its last, or until something arrives."""
        num_decodes = self._limits.num_decodes(self._capacity)
        sequence = self._begin(prompt_len, num_decodes)
        steps = []
        try:
            for length in (prompt_len, *[1] * num_decodes):
                if arrivals.is_set():
                    break
                batch = self._ledger.batch([self._ledger.chunk(sequence, length, 1)], [sequence])
                assert batch is not None
                submitted_s = self._clock.now_s()
                await ranks.submit(batch).output()
                steps.append((batch, self._clock.now_s() - submitted_s))
                self._ledger.retire(batch)
        finally:
            self._ledger.release(sequence)
        return steps

    @property
    def _capacity(self) -> int:
        return min(self._limits.max_len, self._ledger.max_tokens)

    def _begin(self, prompt_len: int, num_decodes: int) -> Sequence:
        """A sequence with blocks and a slot of an idle node."""
        sequence = Sequence(
            key=RequestKey(f"trial-{next(self._numbers)}", 0),
            choices=(0,),
            sampling=GREEDY,
            prompt_len=prompt_len,
            token_ids=[0] * prompt_len,
            end_token_ids=(),
            max_len=prompt_len + num_decodes + 1,
            arrived_s=self._clock.now_s(),
            is_cacheable=False,
        )
        fits = self._ledger.begin(sequence, prompt_len + num_decodes)
        assert fits, "an idle node has room for a trial"
        self._ledger.enter(sequence)
        return sequence
