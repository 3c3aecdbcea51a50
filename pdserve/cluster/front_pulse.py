"""Whether a front's event loop still turns: asked every second, for as long as it answers.

Ray notices a process that ended, not one that is stopped.
"""

import asyncio

from pdserve.cluster.ray_processes import Process
from pdserve.core.errors import NodeLostError, PdserveError
from pdserve.core.silence import LOOK_S, Silence


async def silent(front: Process, limit_s: float) -> PdserveError:
    """Wait until the front did not answer for ``limit_s`` seconds, or its process died; say so."""
    clock = asyncio.get_running_loop().time
    silence = Silence([front], limit_s=limit_s, now_s=clock())
    while True:
        call = front.start_call("alive")
        while not call.done():
            await asyncio.wait((call,), timeout=LOOK_S)
            if not call.done() and silence.look(clock()):
                return NodeLostError(
                    f"{front.name}: nothing heard for {limit_s:g} s: it is stopped"
                )
        try:
            await front.answer(call)
        except PdserveError as error:
            return error
        silence.look(clock())
        silence.heard(front)
        await _until_next_look()


async def _until_next_look() -> None:
    """Nothing could announce that a process will be stopped."""
    await asyncio.sleep(LOOK_S)
