"""Notices a client that takes nothing for so long, at next to no cost for one that reads.

``asyncio.timeout`` around each event would set and cancel a timer for each; this one has a timer
that looks now and then whether the same wait still goes on.
"""

import asyncio
from types import TracebackType
from typing import Self

CHECKS = 4  # within the time allowed, so that it is overstayed by a quarter at most


class StallWatch:
    """Wraps the sending of one answer: ``with StallWatch(...) as watch``, in the task that sends.

    Between ``waits()`` and ``goes_on()`` the client is waited for; when that lasts for ``stall_s``
    the task gets a TimeoutError at the ``with``.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self._stalled = False
        task = asyncio.current_task()
        assert task is not None, "answers are sent by tasks"
        self._task = task
        self._timer = self._look_later()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._stalled and isinstance(error, asyncio.CancelledError):
            if self._task.uncancel() > 0:
                return  # somebody else wants it to end too
            raise TimeoutError(f"nothing was taken for {self._stall_s:g} s") from error

    def waits(self) -> None:
        self._since_s = self._loop.time()

    def goes_on(self) -> None:
        self._since_s = None

    def _look_later(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._stall_s / CHECKS, self._look)

    def _look(self) -> None:
        if self._since_s is not None and self._loop.time() >= self._since_s + self._stall_s:
            self._stalled = True
            self._task.cancel()
        else:
            self._timer = self._look_later()
