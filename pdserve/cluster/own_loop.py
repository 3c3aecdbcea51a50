"""An asyncio loop in a thread of its own, and calls into it from other threads.

Ray calls an actor's methods in threads; what an actor holds lives in this loop.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

Result = TypeVar("Result")


class OwnLoop:
    """Runs from the start until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[None, None, Result]) -> Result:
        """Run ``work`` in the loop and wait for it; any thread but the loop's own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
