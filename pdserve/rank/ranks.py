"""What a node's loop sees of its ranks: steps go in, outputs and KV events come back, in order.

    submit(batch) ──> Step ──> await step.output()        kv(command) ──> await next_event()

Errors surface where something is awaited, never in ``submit`` or ``kv``: once a rank has died, hung
or failed, ``failed`` holds the RankError, every pending and later ``output()`` and ``next_event()``
raises it, and the node ends whole.

Owns the Protocol and what its implementations share (``Arrivals``); knows no process and no ring.
"""

import asyncio
from collections import deque
from typing import Protocol

from kv_transfer.commands import KvCommand, KvEvent
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.batch import Batch, StepOutput


class Step(Protocol):
    """One step in flight."""

    @property
    def batch(self) -> Batch: ...

    @property
    def is_done(self) -> bool:
        """True once ``output`` gives it, or raises, without waiting."""

    def tell(self, news: asyncio.Event) -> None:
        """Set ``news`` once it is done."""

    async def output(self) -> StepOutput:
        """What the step sampled. Raises RankError if it never will."""


class Ranks(Protocol):
    """The ranks of one node. ``addresses[r]`` is ``host:port`` of rank r's KV endpoint."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def addresses(self) -> tuple[str, ...]: ...

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""

    @property
    def failed(self) -> asyncio.Future[RankError]:
        """Done, with the error as its result, as soon as any rank is lost."""

    def submit(self, batch: Batch) -> Step:
        """Start a step; any number may be in flight, they run in this order."""

    def kv(self, command: KvCommand) -> None:
        """Give a command to every rank's KV endpoint, past any step that runs."""

    async def next_event(self) -> tuple[int, KvEvent]:
        """The next event of any rank's KV endpoint and that rank. One caller at a time."""

    async def close(self) -> None:
        """Finish what is in flight and end the ranks."""


class Arrivals:
    """What came back from ranks and who waits for it. Lives in one event loop."""

    def __init__(self, *, step_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_timeout_s = step_timeout_s
        self._steps: deque[SubmittedStep] = deque()
        self._deadline: asyncio.TimerHandle | None = None  # of the oldest step
        self._events: deque[tuple[int, KvEvent]] = deque()
        self._news = asyncio.Event()
        self.failed: asyncio.Future[RankError] = self._loop.create_future()

    def expect(self, batch: Batch) -> "SubmittedStep":
        """The step of a batch that is about to be sent."""
        step = SubmittedStep(batch, self._loop.create_future())
        if self.failed.done():
            step.fail(self.failed.result())
        else:
            self._steps.append(step)
            if len(self._steps) == 1:
                self._start_deadline()
        return step

    def output(self, output: StepOutput) -> None:
        """An output came: it must be the oldest step's."""
        expected = self._steps[0].batch.step if self._steps else None
        if output.step != expected:
            self.fail(RankError(f"output of step {output.step} where {expected} was expected"))
            return
        self._steps.popleft().settle(output)
        self._start_deadline()

    def event(self, rank: int, event: KvEvent) -> None:
        self._events.append((rank, event))
        self._news.set()

    async def next_event(self) -> tuple[int, KvEvent]:
        while not self._events:
            if self.failed.done():
                raise self.failed.result()
            self._news.clear()
            await self._news.wait()
        return self._events.popleft()

    def fail(self, error: RankError) -> None:
        """Tell everybody who waits or will. The first error counts, the rest follow from it."""
        if self.failed.done():
            return
        self.failed.set_result(error)
        self._news.set()
        while self._steps:
            self._steps.popleft().fail(error)
        self._start_deadline()

    def _start_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._steps:
            self._deadline = self._loop.call_later(self._step_timeout_s, self._time_out)

    def _time_out(self) -> None:
        step = self._steps[0].batch.step
        self.fail(RankError(f"step {step}: no output within {self._step_timeout_s} s"))


class SubmittedStep:
    """A Step whose output is brought by ``Arrivals``."""

    def __init__(self, batch: Batch, result: asyncio.Future[StepOutput]) -> None:
        self.batch = batch
        self._result = result

    @property
    def is_done(self) -> bool:
        return self._result.done()

    def tell(self, news: asyncio.Event) -> None:
        self._result.add_done_callback(lambda _: news.set())

    async def output(self) -> StepOutput:
        # Shielded: a caller that is cancelled must not cancel what the ranks will answer.
        return await asyncio.shield(self._result)

    def settle(self, output: StepOutput) -> None:
        self._result.set_result(output)

    def fail(self, error: RankError) -> None:
        self._result.set_exception(error)
        self._result.exception()  # nobody may be waiting; that is no fault to be logged
