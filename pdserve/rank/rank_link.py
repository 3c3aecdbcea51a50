"""The front's link with one rank: its out-ring, its lifeline and its process.

Made by ``meet_ranks`` once the rank is ready. Does not know what the rank says after that.
"""

import asyncio
import os
from dataclasses import replace

from pdserve.core.errors import RankError
from pdserve.core.starvation import ProcessId, own_process
from pdserve.rank.lifeline import FrontLifeline
from pdserve.rank.messages import RankFailed, RankReady
from pdserve.rank.outlet import readable
from pdserve.rank.ring import RingReader
from pdserve.rank.run_dir import RunDir
from pdserve.rank.wire import decode


class RankLink:
    """Owns the out-ring's reading end, the lifeline and a pidfd. ``ended`` is set by the owner."""

    def __init__(self, ready: RankReady, out: RingReader, lifeline: FrontLifeline) -> None:
        self.ready = ready
        self.out = out
        self.ended = asyncio.Event()
        self._lifeline = lifeline
        try:
            self.pidfd = os.pidfd_open(ready.pid)
        except ProcessLookupError as error:
            raise RankError(f"{self}: ended as soon as it was ready") from error

    def __str__(self) -> str:
        return f"rank {self.ready.rank} (pid {self.ready.pid})"

    @property
    def process(self) -> ProcessId:
        """A rank is on the host of its front."""
        return replace(own_process(), pid=self.ready.pid)

    def let_go(self) -> None:
        """End the rank whatever it does: to it the front is gone."""
        self._lifeline.close()

    def close(self) -> None:
        self.let_go()
        self.out.close()
        os.close(self.pidfd)


async def meet_ranks(files: RunDir, tp_size: int, *, timeout_s: float) -> list[RankLink]:
    """Let the ranks in (all rings exist) and wait until each is ready.

    Raises RankError with the reason of the first that fails or ends, or naming those that are not
    ready within ``timeout_s``.
    """
    meetings = [asyncio.create_task(_meet(files, rank)) for rank in range(tp_size)]
    try:
        done, late = await asyncio.wait(
            meetings, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        links = [meeting.result() for meeting in meetings if meeting in done]
        if late:
            names = ", ".join(str(rank) for rank in range(tp_size) if meetings[rank] in late)
            raise RankError(f"ranks {names}: not ready within {timeout_s} s")
    except BaseException:
        for meeting in meetings:
            meeting.cancel()
        for link in await asyncio.gather(*meetings, return_exceptions=True):
            if isinstance(link, RankLink):
                link.close()
        raise
    return links


def failure_of(message: RankFailed) -> RankError:
    """The error that a rank reported."""
    return RankError(f"rank {message.rank} failed: {message.kind}: {message.message}")


async def _meet(files: RunDir, rank: int) -> RankLink:
    out = RingReader(files.out(rank))
    lifeline = FrontLifeline(files.lifeline(rank))
    try:
        lifeline.release()
        return RankLink(await _ready(out, rank), out, lifeline)
    except BaseException:
        lifeline.close()
        out.close()
        raise


async def _ready(out: RingReader, rank: int) -> RankReady:
    await readable(out.fileno())
    try:
        record = out.read(timeout_s=0)
    except RankError as error:
        raise RankError(f"rank {rank}: ended before it was ready") from error
    message = decode(record or b"")
    if isinstance(message, RankFailed):
        raise failure_of(message)
    if not isinstance(message, RankReady) or message.rank != rank:
        raise RankError(f"rank {rank}: {message!r} where its RankReady was expected")
    return message
