"""No rank outlives its front: a thread that waits for the front's end and ends the rank.

The rank gets a moment to end in order: its waits are interrupted. A rank that then is still stuck,
in a collective operation or a kernel, is ended from inside.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from pdserve.rank.lifeline import RankLifeline

logger = logging.getLogger(__name__)

GRACE_S = 3.0


class FrontWatch:
    """Watches as long as its ``with`` block runs. ``interrupts`` end what the rank waits for."""

    def __init__(self, lifeline: RankLifeline, interrupts: Sequence[Callable[[], None]]) -> None:
        self._lifeline = lifeline
        self._interrupts = interrupts
        self._ended = threading.Event()  # the rank has
        self._thread = threading.Thread(target=self._watch, name="front-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._lifeline.wake()
        self._thread.join()

    def _watch(self) -> None:
        if not self._lifeline.wait_for_end():
            return
        for interrupt in self._interrupts:
            interrupt()
        if not self._ended.wait(GRACE_S):
            logger.error("the front is gone and the rank is stuck: exiting")
            os._exit(1)
