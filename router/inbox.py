"""What has come for one call and waits for its reader.

Bounded by the call itself: at most ``max_tokens`` outputs a choice, and one score a prompt token.
One writer (the dispatcher) and one reader; a reader that falls behind finds everything at once.

Readers are woken a few at a time, in the order in which something came for them, and the event loop
looks at its sockets in between. So a router that has more to do than time takes in several steps of
a node before it is each reader's turn, and sends their tokens as one event: it gets slower to the
eye, but keeps up.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.request import PromptOutput, RouteTaken, TokenOutput
from pdserve.core.timeline import Timeline

READERS_A_TURN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOver:
    """The last news of one request. ``error`` None: all its choices are finished."""

    error: PdserveError | None
    timeline: Timeline | None  # None: no node told one
    planned: RouteTaken | None  # None: no node took it
    explain: str  # why it was routed as it was, and what was done where that is not as planned
    num_attempts: int
    cached_tokens: int  # prompt tokens whose KV was not computed for this request


News = PromptOutput | TokenOutput | RequestOver


class Turns:
    """Wakes the readers of inboxes, one round after another."""

    def __init__(self) -> None:
        self._due: deque[asyncio.Future[None]] = deque()
        self._begun = False

    def add(self, reader: asyncio.Future[None]) -> None:
        self._due.append(reader)
        if not self._begun:
            self._begun = True
            reader.get_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(min(READERS_A_TURN, len(self._due))):
            reader = self._due.popleft()
            if not reader.done():  # its call may have ended meanwhile
                reader.set_result(None)
        self._begun = bool(self._due)
        if self._begun:
            self._due[0].get_loop().call_soon(self._wake_some)


class Inbox:
    """News of the requests of one call, each with the number of its prompt."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = asyncio.get_running_loop()  # asked once: asking costs a system call
        self._news: list[tuple[int, News]] = []
        self._has_over = False  # among the news
        self._reader: asyncio.Future[None] | None = None  # waits for ``_wanted`` pieces
        self._wanted = 1

    def put(self, prompt: int, news: News) -> None:
        self._news.append((prompt, news))
        self._has_over = self._has_over or isinstance(news, RequestOver)
        if self._reader is not None and self._is_enough():
            self._turns.add(self._reader)
            self._reader = None

    async def take(self, at_least: int = 1) -> list[tuple[int, News]]:
        """Everything that has come: so many pieces at least, fewer when a request is over."""
        self._wanted = at_least
        if not self._is_enough():
            self._reader = self._loop.create_future()
            await self._reader
        news, self._news, self._has_over = self._news, [], False
        return news

    def _is_enough(self) -> bool:
        return self._has_over or len(self._news) >= self._wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client's call became: one request for each of its prompts."""

    inbox: Inbox
    request_ids: tuple[str, ...]
