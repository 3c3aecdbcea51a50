"""Callers who come together are let in one at a time.

The event loop takes the steps of all its tasks in rounds. Of hundreds of calls that came at once it
would first read all, then check all, then put all on nodes, which have nothing to do until then.
Here each begins when the loop has looked at its sockets, and the call before has gone a step on.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.core.clock import Clock

_SCOPE_KEY = "pdserve.arrived_s"


class OneAtATime:
    """ASGI middleware, of the calls that bring a body. A lone caller waits for nothing."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # this round's turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            scope[_SCOPE_KEY] = self._clock.now_s()
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next_round)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next_round(self) -> None:
        while self._waiting:
            caller = self._waiting.popleft()
            if not caller.done():  # it may have gone
                caller.set_result(None)
                caller.get_loop().call_soon(self._next_round)
                return
        self._is_taken = False


def arrived_s_of(scope: Scope) -> float:
    """When the call came, by the middleware's clock: its wait for a turn is the caller's too."""
    arrived_s: float = scope[_SCOPE_KEY]
    return arrived_s
