"""Whether a node takes new work, and what others should be told of it before the next second."""

import asyncio
from collections.abc import AsyncGenerator


class Readiness:
    """``problem`` says why the node takes no new work; None while it does."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._is_idle = True
        self._changed = asyncio.Event()

    def lose(self, problem: str) -> None:
        """The node takes no more work. The first reason counts."""
        if self.problem is None:
            self.problem = problem
            self.tell()

    def note_idle(self, is_idle: bool) -> None:
        """Others learn at once that the last work has ended and every block is free."""
        if is_idle and not self._is_idle:
            self.tell()
        self._is_idle = is_idle

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
