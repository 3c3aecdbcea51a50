"""The processes of one node, or the router's, as Ray actors: watched and ended together.

Owns what Ray's errors mean. Ending is final whatever a process does: Ray kills, and the removal of
a placement group kills even what is stopped.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from pdserve.cluster.outcome import Failure
from pdserve.cluster.ray_head import RayHead
from pdserve.core.errors import InternalError, NodeLostError, PdserveError

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0  # of a small call
END_TIMEOUT_S = 10.0  # for a killed process to be gone

Answer = asyncio.Future[Any]  # of an actor's method; Ray knows no types of them


class Process:
    """One actor. Every error that its calls raise is a PdserveError."""

    def __init__(self, name: str, actor: Any) -> None:  # noqa: ANN401  (an ActorHandle)
        self.name = name
        self._actor = actor

    def start_call(self, method: str, *arguments: object) -> Answer:
        """Call at once; to be awaited through ``answer``."""
        reference = getattr(self._actor, method).remote(*arguments)
        call = asyncio.wrap_future(reference.future())
        call.add_done_callback(_retrieve)  # nobody may be waiting when the process is killed
        return call

    async def answer(self, call: Answer) -> Any:  # noqa: ANN401
        """What a call answered. Raises what its ``Failure`` says, or NodeLostError."""
        try:
            value = await asyncio.shield(call)
        except RayActorError as error:
            raise NodeLostError(f"{self.name}: its process died") from error
        except RayError as error:
            raise InternalError(f"{self.name}: {error}") from error
        if isinstance(value, Failure):
            raise value.error()
        return value

    async def control(self, method: str, *arguments: object, timeout_s: float) -> Any:  # noqa: ANN401
        """Make a small call. Raises NodeLostError where no answer comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.answer(self.start_call(method, *arguments))
        except TimeoutError as error:
            raise NodeLostError(f"{self.name}: {method}: no answer in {timeout_s:g} s") from error

    def kill(self) -> None:
        try:
            ray.kill(self._actor, no_restart=True)
        except RayError as error:  # Ray is gone: who is orphaned, ``RayHead.end`` kills
            logger.warning("%s: %s", self.name, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A call that lasts as long as its process is well."""

    process: Process
    call: Answer


class ProcessGroup:
    """Processes that end together."""

    def __init__(
        self, processes: Sequence[Process], group: PlacementGroup | None, head: RayHead
    ) -> None:
        self._processes = processes
        self._group = group
        self._head = head
        self._endings: list[Ending] = []

    def watch(self, process: Process, call: Answer) -> None:
        """The end of ``call`` is the end of all."""
        self._endings.append(Ending(process=process, call=call))

    async def ended(self) -> PdserveError:
        """Wait for the first end; say why."""
        calls = {ending.call: ending.process for ending in self._endings}
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        reasons = [await _reason(calls[call], call) for call in done]
        return reasons[0]

    async def answer_unless_ended(self, process: Process, call: Answer) -> Any:  # noqa: ANN401
        """What a call answers. Raises its error, or that of the first end before it."""
        calls = [call, *(ending.call for ending in self._endings)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise await self.ended()
        return await process.answer(call)

    async def close(self, front: Process, grace_s: float) -> None:
        """Let the front end its ranks in order; then end what is left."""
        try:
            await front.control("close", grace_s, timeout_s=grace_s + END_TIMEOUT_S)
        except PdserveError as error:
            logger.warning("%s did not close in order: %s", front.name, error)
        await self.kill()

    async def kill(self) -> None:
        """End all processes now and wait until they are gone. May be called again."""
        if not await self._head.usable():
            return  # of a private Ray, ``RayHead.end`` has killed them; others end with its head
        for process in self._processes:
            process.kill()
        if self._group is not None:
            _remove(self._group)
        calls = [ending.call for ending in self._endings]
        if calls:
            _, pending = await asyncio.wait(calls, timeout=END_TIMEOUT_S)
            for call in pending:
                logger.error("a killed process still answers: %s", call)


def _remove(group: PlacementGroup) -> None:
    try:
        remove_placement_group(group)
    except RayError as error:
        logger.warning("a placement group could not be removed: %s", error)


def _retrieve(call: Answer) -> None:
    if not call.cancelled():
        call.exception()


async def _reason(process: Process, call: Answer) -> PdserveError:
    try:
        await process.answer(call)
    except PdserveError as error:
        return error
    return NodeLostError(f"{process.name}: it stopped by itself")
