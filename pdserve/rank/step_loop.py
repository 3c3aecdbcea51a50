"""The one loop of a node: the scheduler decides, the ranks compute, ``depth`` steps fly."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from pdserve.core.clock import Clock
from pdserve.engine.batch import Batch, StepOutput
from pdserve.rank.ranks import Ranks, Step


class Scheduler(Protocol):
    """What both schedulers are to the loop."""

    def next_batch(self) -> Batch | None: ...

    def apply(self, batch: Batch, output: StepOutput) -> None: ...


async def run_steps(
    scheduler: Scheduler, ranks: Ranks, *, depth: int, arrivals: asyncio.Event, clock: Clock
) -> AsyncIterator[float | None]:
    """Run steps for ever; pause for the owner after each plan and after each result.

    Yields None after planning and, after a result, when that step was submitted (seconds of
    ``clock``). The owner acts on the scheduler's events at each pause and sets ``arrivals``
    whenever there may be something new to plan. Raises RankError when the ranks are lost.
    """
    in_flight: deque[tuple[Step, float]] = deque()
    while True:
        arrivals.clear()
        while len(in_flight) < depth and (batch := scheduler.next_batch()):
            in_flight.append((ranks.submit(batch), clock.now_s()))
        yield None
        if not in_flight:
            await arrivals.wait()
            continue
        step, submitted_s = in_flight.popleft()
        scheduler.apply(step.batch, await step.output())
        yield submitted_s
