"""Whether a node takes new work, and what others should be told of it before the next second."""

import asyncio
from collections.abc import AsyncGenerator


class Readiness:
    """``problem`` says why the node takes no new work; None while it does."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._changed = asyncio.Event()

    def lose(self, problem: str) -> None:
        """The node takes no more work. The first reason counts."""
        if self.problem is None:
            self.problem = problem
            self.tell()

    def note_idle(self, is_idle: bool) -> None:
        """Others learn at once that the last work has ended and every block is free."""
        if not is_idle:
            self._idle.clear()
        elif not self._idle.is_set():
            self._idle.set()
            self.tell()

    async def until_idle(self) -> None:
        """Wait until the node holds nothing."""
        await self._idle.wait()

    def tell(self) -> None:
        """Something has changed that others should know at once."""
        self._changed.set()

    async def changes(self, period_s: float) -> AsyncGenerator[None, None]:
        """Yield at once, after each change and at least every ``period_s`` seconds, for ever."""
        while True:
            self._changed.clear()
            yield
            try:
                async with asyncio.timeout(period_s):
                    await self._changed.wait()
            except TimeoutError:
                pass  # time for the next one
