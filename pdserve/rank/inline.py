"""One rank in the front's own process: for tests, and where no second process is wanted.

The same ``Ranks`` as over rings, without their independence: a busy runner slows the event loop.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import TypeVar, cast

from kv_transfer.commands import EndpointFailed, KvCommand, KvEvent
from pdserve.core.errors import RankError
from pdserve.engine.batch import Batch
from pdserve.rank.parts import RankParts
from pdserve.rank.ranks import Arrivals, Step

T = TypeVar("T")


async def start_inline_ranks(
    open_parts: Callable[[], AbstractContextManager[RankParts]], *, step_timeout_s: float
) -> "InlineRanks":
    """Open the parts of a group of one on a thread of their own and warm them up."""
    loop = asyncio.get_running_loop()
    runner_thread = ThreadPoolExecutor(1, "inline-runner")
    stack = ExitStack()
    try:
        parts = await loop.run_in_executor(runner_thread, stack.enter_context, open_parts())
        await loop.run_in_executor(runner_thread, parts.runner.warm_up)
    except BaseException:
        runner_thread.shutdown()
        stack.close()
        raise
    return InlineRanks(parts, stack, runner_thread, step_timeout_s=step_timeout_s)


class InlineRanks:
    """``Ranks`` of one rank in this process. Made by ``start_inline_ranks``."""

    def __init__(
        self,
        parts: RankParts,
        stack: ExitStack,
        runner_thread: ThreadPoolExecutor,
        *,
        step_timeout_s: float,
    ) -> None:
        self.num_blocks = parts.runner.num_blocks
        self.layout = parts.runner.layout
        self.addresses = (parts.endpoint.address,)
        self.pids = (os.getpid(),)
        self._parts = parts
        self._stack = stack
        self._loop = asyncio.get_running_loop()
        self._arrivals = Arrivals(step_timeout_s=step_timeout_s)
        self._runner_thread = runner_thread
        self._kv_thread = ThreadPoolExecutor(1, "inline-kv")
        self._events = cast("SimpleQueue[KvEvent | None]", parts.endpoint.events)
        self._events_thread = threading.Thread(target=self._forward_events, daemon=True)
        self._events_thread.start()
        self._closing = False

    @property
    def failed(self) -> asyncio.Future[RankError]:
        return self._arrivals.failed

    def submit(self, batch: Batch) -> Step:
        step = self._arrivals.expect(batch)
        if not self.failed.done():
            self._runner_thread.submit(self._guard, self._run, batch)
        return step

    def kv(self, command: KvCommand) -> None:
        if not self.failed.done():
            self._kv_thread.submit(self._guard, self._parts.endpoint.handle, command)

    async def next_event(self) -> tuple[int, KvEvent]:
        return await self._arrivals.next_event()

    async def close(self) -> None:
        """Finish what was submitted, then take the parts down."""
        if self._closing:
            return
        self._closing = True
        await asyncio.to_thread(self._end)
        self._arrivals.fail(RankError("the ranks are closed"))

    def _end(self) -> None:
        self._runner_thread.shutdown()
        self._kv_thread.shutdown()
        self._stack.close()
        self._events.put(None)
        self._events_thread.join()

    def _run(self, batch: Batch) -> None:
        output = self._parts.runner.launch(batch).wait()
        self._loop.call_soon_threadsafe(self._arrivals.output, output)

    def _forward_events(self) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, EndpointFailed):
                lost = RankError(f"rank 0 failed: {event.reason}")
                self._loop.call_soon_threadsafe(self._arrivals.fail, lost)
            else:
                self._loop.call_soon_threadsafe(self._arrivals.event, 0, event)

    def _guard(self, work: Callable[[T], None], argument: T) -> None:
        """The outermost function of the worker threads."""
        try:
            work(argument)
        except Exception as error:
            lost = RankError(f"rank 0 failed: {error!r}")
            lost.__cause__ = error
            self._loop.call_soon_threadsafe(self._arrivals.fail, lost)
