"""The one loop of a node: the scheduler decides, the ranks compute, ``depth`` steps fly."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from pdserve.core.clock import Clock
from pdserve.engine.batch import Batch, StepOutput
from pdserve.rank.idle_trials import IdleTrials
from pdserve.rank.ranks import Ranks, Step
from pdserve.rank.step_meter import StepMeter


class Scheduler(Protocol):
    """What both schedulers are to the loop."""

    @property
    def waits_for_owner(self) -> bool:
        """True if what the owner makes of a result comes before the next plan."""

    def next_batch(self) -> Batch | None: ...

    def apply(self, batch: Batch, output: StepOutput) -> None: ...


async def run_steps(
    scheduler: Scheduler,
    ranks: Ranks,
    *,
    depth: int,
    arrivals: asyncio.Event,
    clock: Clock,
    meter: StepMeter,
    trials: IdleTrials,
) -> AsyncIterator[float | None]:
    """Run steps for ever; pause for the owner after each plan and after each result.

    Yields None after planning and, after a result, when that step was submitted (seconds of
    ``clock``). The owner acts on the scheduler's events at each pause and sets ``arrivals``
    whenever there may be something new to plan; that is done at once while fewer than ``depth``
    steps fly. After a result the next step goes out before the owner hears of it, so that the ranks
    do not wait while it tells others, unless the scheduler waits for that. ``meter`` is told what
    each step took, from the end of the one before it unless the loop paused. ``trials`` are run
    while there is nothing to do. Raises RankError when the ranks are lost.
    """
    in_flight: deque[tuple[Step, float]] = deque()
    ended_s: float | None = None  # when the step before ended; None: the loop paused since
    unmeasured: tuple[Batch, float, float | None] | None = None  # that step, as the meter takes it
    untold_s: float | None = None  # when the step was submitted whose result is to be told
    while True:
        arrivals.clear()
        if untold_s is not None and scheduler.waits_for_owner:
            yield untold_s
            untold_s = None
        while len(in_flight) < depth and (batch := scheduler.next_batch()):
            step = ranks.submit(batch)
            step.tell(arrivals)
            in_flight.append((step, clock.now_s()))
        if unmeasured is not None:  # now that the ranks have something to do
            meter.observe(*unmeasured)
            unmeasured = None
        if untold_s is not None:
            yield untold_s
            untold_s = None
            continue  # the owner may have made more plannable
        yield None
        if not in_flight:
            await trials.rest(arrivals, ranks, has_worked=ended_s is not None)
            ended_s = None
            continue
        if len(in_flight) < depth and not in_flight[0][0].is_done:
            await arrivals.wait()
            if not in_flight[0][0].is_done:
                continue  # something came that may be planned behind what flies
        step, submitted_s = in_flight.popleft()
        output = await step.output()
        began_s, ended_s = submitted_s if ended_s is None else ended_s, clock.now_s()
        unmeasured = step.batch, ended_s - began_s, output.device_s
        scheduler.apply(step.batch, output)
        untold_s = submitted_s
