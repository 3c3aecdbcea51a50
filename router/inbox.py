"""What has come for one call and waits for its reader.

Bounded by the call itself: at most ``max_tokens`` outputs a choice. One writer (the dispatcher) and
one reader; a reader that falls behind finds everything at once.
"""

import asyncio
from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.request import RouteTaken, TokenOutput
from pdserve.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOver:
    """The last news of one request. ``error`` None: all its choices are finished."""

    error: PdserveError | None
    timeline: Timeline | None  # None: no node told one
    planned: RouteTaken | None  # None: no node took it
    explain: str  # why it was routed as it was, and what was done where that is not as planned
    num_attempts: int
    cached_tokens: int  # prompt tokens whose KV was not computed for this request


News = TokenOutput | RequestOver


class Inbox:
    """News of the requests of one call, each with the number of its prompt."""

    def __init__(self) -> None:
        self._news: list[tuple[int, News]] = []
        self._arrived = asyncio.Event()

    def put(self, prompt: int, news: News) -> None:
        self._news.append((prompt, news))
        self._arrived.set()

    async def take(self) -> list[tuple[int, News]]:
        """Everything that has come, at least one piece of news."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, []
        return news
