"""The front's end of a ring to the ranks: never blocks the event loop.

Records go into the ring at once while there is space, else they wait here in order and follow as
the ranks give space back. Ranks that give none back for too long are an error.
"""

import asyncio
from collections import deque

from pdserve.rank.ring import RingWriter


class Outlet:
    """Owns the writer. ``run`` must be running for records that had to wait to get out."""

    def __init__(self, writer: RingWriter, *, timeout_s: float) -> None:
        self._writer = writer
        self._timeout_s = timeout_s
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()

    def send(self, record: bytes) -> None:
        """Send now or, behind what waits, later. Raises RankError if a rank is gone."""
        if self._waiting or not self._writer.try_write(record):
            self._waiting.append(record)
            self._news.set()

    async def run(self) -> None:
        """Send what waits. Ends by RankError: a rank is gone, or gives no space back in time."""
        while True:
            while self._waiting:
                await self._write(self._waiting[0])
                self._waiting.popleft()
            self._news.clear()
            await self._news.wait()

    def close(self) -> None:
        self._writer.close()

    async def _write(self, record: bytes) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        while not self._writer.try_write(record):
            try:
                async with asyncio.timeout_at(deadline_s):
                    await readable(self._writer.slowest_fd)
            except TimeoutError:
                raise self._writer.no_space(len(record), self._timeout_s) from None


async def readable(fd: int) -> None:
    """Wait until ``fd`` has data or its other end is gone."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_reader(fd, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(fd)
