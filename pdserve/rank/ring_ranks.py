"""The ranks of a node as processes of its host, reached over shared-memory rings.

    steps  front ──> all ranks   batches, stop      read by each rank's main thread
    kv     front ──> all ranks   KV commands, stop  read by each rank's KV thread, past any step
    out.r  rank r ──> front      ready, pulse, failed, KV events; rank 0: outputs

A rank's death shows on its pidfd and on its out-ring, at once; a stopped process as silence on its
out-ring, where it does not only get no CPU; a step that hangs in a process that runs, as the oldest
step's deadline. Owns the rings' files, which are unlinked as soon as all ranks have opened them, so
that nothing stays behind however the front ends. Starting and killing processes is the caller's.
"""

import asyncio
import logging
from contextlib import ExitStack
from pathlib import Path

from kv_transfer.commands import KvCommand, KvEvent
from pdserve.core.errors import RankError, RingClosedError
from pdserve.core.silence import LOOK_S, Silence
from pdserve.core.starvation import KernelStarvation, Starvation
from pdserve.engine.batch import Batch, StepOutput
from pdserve.rank.intake import MAX_PROMPT_LOGPROBS
from pdserve.rank.messages import Pulse, RankFailed, Stop
from pdserve.rank.outlet import Outlet
from pdserve.rank.rank_link import RankLink, failure_of, meet_ranks
from pdserve.rank.ranks import Arrivals, Step
from pdserve.rank.ring import RingWriter, create_ring, remove_ring
from pdserve.rank.run_dir import RunDir
from pdserve.rank.wire import decode, encode

logger = logging.getLogger(__name__)

STEPS_BYTES = 16 << 20  # half of it, a part, holds a million tokens; longer batches take several
KV_BYTES = 1 << 20
OUT_BYTES = 1 << 20
SCORED_TOKEN_BYTES = 24 + 16 * MAX_PROMPT_LOGPROBS  # of a prompt token, as `wire.py` writes them
CLOSE_TIMEOUT_S = 10.0
RANK_SILENCE_S = 5.0


def outputs_bytes(max_step_tokens: int) -> int:
    """A ring whose half, the most that a part may fill, holds what any step says of its prompts."""
    wanted = OUT_BYTES + 2 * SCORED_TOKEN_BYTES * max_step_tokens
    return 1 << (wanted - 1).bit_length()


async def start_ranks(
    *,
    run_dir: Path,
    tp_size: int,
    start_timeout_s: float,
    step_timeout_s: float,
    silence_s: float = RANK_SILENCE_S,
    max_step_tokens: int = 0,
    starvation: Starvation | None = None,
) -> "RingRanks":
    """Make the rings in ``run_dir`` (which exists) and wait until all ranks are ready.

    The caller starts the rank processes, before or meanwhile. A step has ``max_step_tokens`` prompt
    tokens at most. Raises RankError as soon as a rank fails, or when one is not ready within
    ``start_timeout_s``.
    """
    files = RunDir(run_dir)
    broadcasts = {files.steps: STEPS_BYTES, files.kv: KV_BYTES}
    outs = [files.out(rank) for rank in range(tp_size)]
    try:
        for path, capacity in broadcasts.items():
            create_ring(path, capacity=capacity, num_readers=tp_size)
        for rank, path in enumerate(outs):
            capacity = OUT_BYTES if rank else outputs_bytes(max_step_tokens)
            create_ring(path, capacity=capacity, num_readers=1)
        links = await meet_ranks(files, tp_size, timeout_s=start_timeout_s)
        with ExitStack() as undo:
            for link in links:
                undo.callback(link.close)
            steps = Outlet(RingWriter(files.steps), timeout_s=step_timeout_s)
            undo.callback(steps.close)
            kv = Outlet(RingWriter(files.kv), timeout_s=step_timeout_s)
            undo.pop_all()
    finally:
        for path in (*broadcasts, *outs):
            remove_ring(path)
    return RingRanks(
        links,
        steps,
        kv,
        step_timeout_s=step_timeout_s,
        silence_s=silence_s,
        starvation=starvation or KernelStarvation(),
    )


class RingRanks:
    """``Ranks`` over rings. Made by ``start_ranks``."""

    def __init__(
        self,
        links: list[RankLink],
        steps: Outlet,
        kv: Outlet,
        *,
        step_timeout_s: float,
        silence_s: float,
        starvation: Starvation,
    ) -> None:
        self.num_blocks = min(link.ready.num_blocks for link in links)
        self.layout = links[0].ready.layout
        self.addresses = tuple(link.ready.address for link in links)
        self.pids = tuple(link.ready.pid for link in links)
        self._arrivals = Arrivals(step_timeout_s=step_timeout_s)
        self._links = links
        self._steps = steps
        self._kv = kv
        self._closing = False
        loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self._starvation = starvation
        self._silence = Silence(links, limit_s=silence_s, now_s=loop.time())
        self._looking = loop.call_later(LOOK_S, self._look)
        self._tasks = [loop.create_task(self._flush(outlet)) for outlet in (steps, kv)]
        for link in links:
            loop.add_reader(link.out.fileno(), self._on_news, link)
            loop.add_reader(link.pidfd, self._on_exit, link)

    @property
    def failed(self) -> asyncio.Future[RankError]:
        return self._arrivals.failed

    def submit(self, batch: Batch) -> Step:
        step = self._arrivals.expect(batch)
        self._send(self._steps, encode(batch))
        return step

    def kv(self, command: KvCommand) -> None:
        self._send(self._kv, encode(command))

    async def next_event(self) -> tuple[int, KvEvent]:
        return await self._arrivals.next_event()

    async def close(self) -> None:
        """End the ranks: by Stop, or if they have failed by letting go of them."""
        if self._closing:
            return
        self._closing = True
        for outlet in (self._steps, self._kv):
            self._send(outlet, encode(Stop()))
        if self.failed.done():
            for link in self._links:
                link.let_go()
        await self._wait_for_ends()
        self._looking.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._arrivals.fail(RankError("the ranks are closed"))
        for link in self._links:
            self._unwatch(link)
            link.close()
        self._steps.close()
        self._kv.close()

    def _send(self, outlet: Outlet, record: bytes) -> None:
        if self.failed.done():
            return
        try:
            outlet.send(record)
        except RankError as error:
            self._on_unwritable(error)

    async def _flush(self, outlet: Outlet) -> None:
        try:
            await outlet.run()
        except RankError as error:
            self._on_unwritable(error)

    def _on_unwritable(self, error: RankError) -> None:
        for link in self._links:  # what a rank said before it ended tells more
            self._on_news(link)
        is_end = isinstance(error, RingClosedError)
        if not self._closing:
            self._arrivals.fail(RankError(f"a rank ended: {error}") if is_end else error)

    def _look(self) -> None:
        """Whoever said nothing for too long is stopped or as good as dead."""
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(LOOK_S, self._look)
        now_s = loop.time()
        starved = [
            link for link in self._silence.quiet if self._starvation.starves(link.process, now_s)
        ]
        for link in self._silence.look(now_s, starved):
            if not self._closing:
                self._arrivals.fail(
                    RankError(f"{link}: nothing heard for {self._silence_s:g} s: it is stopped")
                )

    def _on_news(self, link: RankLink) -> None:
        try:
            for record in link.out.read_ready():
                self._receive(link, record)
        except RingClosedError:
            self._on_end(link, RankError(f"{link}: ended"))
        except RankError as error:
            self._on_end(link, error)

    def _on_exit(self, link: RankLink) -> None:
        self._on_news(link)  # its last words first
        self._on_end(link, RankError(f"{link}: ended"))

    def _on_end(self, link: RankLink, error: RankError) -> None:
        self._unwatch(link)
        link.ended.set()
        if not self._closing:
            self._arrivals.fail(error)

    def _receive(self, link: RankLink, record: bytes) -> None:
        message = decode(record)
        self._silence.heard(link)
        if isinstance(message, Pulse):
            return
        if isinstance(message, StepOutput):
            self._arrivals.output(message)
        elif isinstance(message, KvEvent):
            self._arrivals.event(link.ready.rank, message)
        elif isinstance(message, RankFailed):
            raise failure_of(message)
        else:
            raise RankError(f"{link}: unexpected {type(message).__name__}")

    def _unwatch(self, link: RankLink) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(link.out.fileno())
        loop.remove_reader(link.pidfd)

    async def _wait_for_ends(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for link in self._links:
                    await link.ended.wait()
        except TimeoutError:
            running = [str(link) for link in self._links if not link.ended.is_set()]
            logger.warning("still running after stop: %s", ", ".join(running))
