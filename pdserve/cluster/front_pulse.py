"""Whether a front's event loop still turns: asked every second, for as long as it answers.

Ray notices a process that ended, not one that is stopped. One that only gets no CPU is not taken
for stopped as long as its host tells so: to make it anew would cost more CPU still.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.ray_processes import Answer
from pdserve.core.errors import NodeLostError, PdserveError
from pdserve.core.silence import LOOK_S, Silence
from pdserve.core.starvation import ProcessId, Starvation

logger = logging.getLogger(__name__)


class Front(Protocol):
    """A front process that can be called; ``ray_processes.Process`` is one."""

    @property
    def name(self) -> str: ...

    def start_call(self, method: str) -> Answer: ...

    async def answer(self, call: Answer) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontWatch:
    """How one front is watched: its process, and for how long it may say nothing."""

    process: ProcessId
    limit_s: float
    starvation: Starvation

    async def silent(self, front: Front) -> PdserveError:
        """Wait until the front did not answer for too long, or its process died; say so."""
        clock = asyncio.get_running_loop().time
        silence = Silence([self.process], limit_s=self.limit_s, now_s=clock())
        while True:
            call = front.start_call("alive")
            if not await self._answered(call, front.name, silence):
                return NodeLostError(
                    f"{front.name}: nothing heard for {self.limit_s:g} s: it is stopped"
                )
            try:
                await front.answer(call)
            except PdserveError as error:
                return error
            silence.look(clock())
            silence.heard(self.process)
            await _until_next_look()

    async def _answered(self, call: Answer, name: str, silence: Silence[ProcessId]) -> bool:
        """Wait for the answer; False when it takes too long."""
        clock = asyncio.get_running_loop().time
        is_told = False
        while not call.done():
            await asyncio.wait((call,), timeout=LOOK_S)
            now_s = clock()
            starved = [each for each in silence.quiet if self.starvation.starves(each, now_s)]
            if starved and not is_told:
                logger.warning("%s does not answer: it gets no CPU", name)
                is_told = True
            if silence.look(now_s, starved) and not call.done():
                return False
        return True


async def _until_next_look() -> None:
    """Nothing could announce that a process will be stopped."""
    await asyncio.sleep(LOOK_S)
