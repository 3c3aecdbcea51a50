"""Keeps every node of a cluster and its router running, and everybody told of whom to talk to.

A node lives and dies whole: when any of its processes ends, all of them are ended, the others are
told, and the node is made anew as another incarnation while they serve.

    starting ── started ──> serving ── a process ended ──> ended whole ── back-off ──> starting
                               `──────────── close ──────────────────────────────────> closed

Owns which incarnations run. Knows neither Ray nor processes: a ``Launcher`` starts, a ``Running``
is watched and ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.resolve import NodePlan
from pdserve.core.clock import Clock
from pdserve.core.errors import PdserveError
from pdserve.core.node import NodeAddress, Role

logger = logging.getLogger(__name__)


class Running(Protocol):
    """A node or the router, in processes of its own."""

    async def set_nodes(self, nodes: tuple[NodeAddress, ...]) -> None:
        """Whom to talk to from now on. Raises PdserveError where it has died meanwhile."""

    async def ended(self) -> PdserveError:
        """Wait until any of its processes ended or failed; say why."""

    async def close(self, grace_s: float) -> None:
        """End it in order: what it holds may finish for ``grace_s`` seconds. Never raises."""

    async def kill(self) -> None:
        """End all its processes now, whatever they do. Never raises; may be called again."""


class RunningNode(Running, Protocol):
    """One incarnation of a node."""

    @property
    def address(self) -> NodeAddress: ...


class Launcher(Protocol):
    """Starts processes. A start that fails raises a PdserveError and leaves nothing running."""

    async def start_node(self, plan: NodePlan) -> RunningNode: ...

    async def start_router(self) -> Running: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait before the next start of what keeps ending."""

    first_s: float = 0.5
    longest_s: float = 30.0
    settled_s: float = 60.0  # whatever ran for so long starts again with ``first_s``


class Supervisor:
    """Start with ``start``; afterwards ``close`` or ``kill`` ends everything."""

    def __init__(
        self,
        launcher: Launcher,
        plans: Sequence[NodePlan],
        *,
        clock: Clock,
        backoff: Backoff,
        on_event: Callable[[str], None],
    ) -> None:
        self._launcher = launcher
        self._plans = plans
        self._clock = clock
        self._backoff = backoff
        self._on_event = on_event
        self._nodes: dict[str, RunningNode] = {}
        self._router: Running | None = None
        self._announcing = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the nodes side by side, then the router, and keep them all from then on.

        Raises the PdserveError of whatever could not start; the rest is ended then.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for plan in self._plans:
                    group.create_task(self._start_node(plan))
            await self._start_router()
        except BaseExceptionGroup as errors:
            await self.kill()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.kill()
            raise
        self._keepers = [asyncio.create_task(self._keep_node(plan)) for plan in self._plans]
        self._keepers.append(asyncio.create_task(self._keep_router()))

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        """The nodes that run now, in the order of the plans."""
        return tuple(self._nodes[p.name].address for p in self._plans if p.name in self._nodes)

    async def close(self, grace_s: float) -> None:
        """End the router first: its requests finish or are aborted. Then the nodes hold nothing."""
        await self._stop_keeping()
        if self._router is not None:
            await self._router.close(grace_s)
            self._router = None
        await asyncio.gather(*(node.close(0.0) for node in self._nodes.values()))
        self._nodes.clear()

    async def kill(self) -> None:
        """End everything at once."""
        await self._stop_keeping()
        running: list[Running] = list(self._nodes.values())
        if self._router is not None:
            running.append(self._router)
        await asyncio.gather(*(one.kill() for one in running))
        self._nodes.clear()
        self._router = None

    async def _stop_keeping(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []

    async def _start_node(self, plan: NodePlan) -> None:
        node = await self._launcher.start_node(plan)
        self._nodes[plan.name] = node
        await self._announce()

    async def _start_router(self) -> None:
        self._router = await self._launcher.start_router()
        await self._announce()

    async def _keep_node(self, plan: NodePlan) -> None:
        delays = _Delays(self._backoff, self._clock)
        while True:
            node = self._nodes.get(plan.name)
            if node is not None:
                await self._lose_node(plan, node, await node.ended())
            await asyncio.sleep(delays.next_s())
            try:
                await self._start_node(plan)
            except PdserveError as error:
                self._on_event(f"{plan.name} did not start again: {error}")
                continue
            delays.started()
            self._on_event(f"{plan.name} serves again")

    async def _lose_node(self, plan: NodePlan, node: RunningNode, error: PdserveError) -> None:
        self._on_event(f"{plan.name} ended: {error}; making it anew")
        await node.kill()
        del self._nodes[plan.name]  # only now: whoever cancels us still ends it
        await self._announce()

    async def _keep_router(self) -> None:
        delays = _Delays(self._backoff, self._clock)
        while True:
            if self._router is not None:
                error = await self._router.ended()
                self._on_event(f"router ended: {error}; making it anew")
                await self._router.kill()
                self._router = None
            await asyncio.sleep(delays.next_s())
            try:
                await self._start_router()
            except PdserveError as error:
                self._on_event(f"router did not start again: {error}")
                continue
            delays.started()
            self._on_event("router serves again")

    async def _announce(self) -> None:
        """Tell decode nodes and router who is there. One at a time: the last word is the truth."""
        async with self._announcing:
            addresses = self.addresses
            prefill = tuple(a for a in addresses if a.role is Role.PREFILL)
            told = [
                node.set_nodes(prefill)
                for node in self._nodes.values()
                if node.address.role is Role.DECODE
            ]
            if self._router is not None:
                told.append(self._router.set_nodes(addresses))
            for result in await asyncio.gather(*told, return_exceptions=True):
                if isinstance(result, PdserveError):  # its keeper is about to notice
                    logger.warning("could not announce nodes: %s", result)
                elif isinstance(result, BaseException):
                    raise result


class _Delays:
    """Waiting times between starts: doubled each time, short again after a long life."""

    def __init__(self, backoff: Backoff, clock: Clock) -> None:
        self._backoff = backoff
        self._clock = clock
        self._delay_s = backoff.first_s
        self._started_s = clock.now_s()

    def started(self) -> None:
        self._started_s = self._clock.now_s()

    def next_s(self) -> float:
        """How long to wait now."""
        if self._clock.now_s() - self._started_s >= self._backoff.settled_s:
            self._delay_s = self._backoff.first_s
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, self._backoff.longest_s)
        return delay_s
