"""Keeps every node of a cluster and its router running, and everybody told of whom to talk to.

A node lives and dies whole: when any of its processes ends, all of them are ended, the others are
told, and the node is made anew as another incarnation while they serve.

    starting ── started ──> serving ── a process ended ──> ended whole ── back-off ──> starting
                             |    `───────── close ──────────────────────────────────> closed
                             `── scaled down ──> draining ── idle ──> closed

An operator's orders come by the router, which is told how every node stands.

Owns which incarnations run. Knows neither Ray nor processes: a ``Launcher`` starts, a ``Running``
is watched and ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.scaling import change_for, number_of
from pdserve.core.clock import Clock
from pdserve.core.errors import InvalidRequestError, PdserveError
from pdserve.core.node import NodeAddress, NodeStanding, Role, Standing
from pdserve.core.orders import Drain, Order, OrderAnswer, PlacedOrder, Scale, refusal

DRAIN_TIMEOUT_S = 900.0  # for requests of a node that is scaled away; then they go on elsewhere

logger = logging.getLogger(__name__)


class Running(Protocol):
    """A node or the router, in processes of its own."""

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        """How all nodes stand. Raises PdserveError where it has died meanwhile."""

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

    async def until_idle(self) -> None:
        """Wait until it holds nothing. Raises PdserveError where it dies before."""


class RunningRouter(Running, Protocol):
    """The router, by which orders come. Both raise PdserveError where it dies."""

    async def next_order(self) -> PlacedOrder:
        """Wait for the next order."""

    async def answer(self, answer: OrderAnswer) -> None:
        """Tell who placed an order what has begun."""


class Launcher(Protocol):
    """Starts processes. A start that fails raises a PdserveError and leaves nothing running."""

    async def start_node(self, plan: NodePlan) -> RunningNode: ...

    async def start_router(self) -> RunningRouter: ...


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
        self._plans = {plan.name: plan for plan in plans}
        self._templates = {plan.role: plan for plan in reversed(plans)}
        self._clock = clock
        self._backoff = backoff
        self._on_event = on_event
        self._nodes: dict[str, RunningNode] = {}
        self._absent: dict[
            str, tuple[Standing, str]
        ] = {}  # why a node does not run, if it ever did
        self._draining: set[str] = set()
        self._router: RunningRouter | None = None
        self._router_changed = asyncio.Event()  # for one reader, who clears it
        self._telling: WeakKeyDictionary[Running, asyncio.Lock] = WeakKeyDictionary()
        self._node_keepers: dict[str, asyncio.Task[None]] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._router_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the nodes side by side, then the router, and keep them all from then on.

        Raises the PdserveError of whatever could not start; the rest is ended then.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for plan in self._plans.values():
                    group.create_task(self._start_node(plan))
            await self._start_router()
        except BaseExceptionGroup as errors:
            await self.kill()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.kill()
            raise
        for plan in self._plans.values():
            self._keep(plan)
        self._router_tasks = [
            asyncio.create_task(self._keep_router()),
            asyncio.create_task(self._follow_orders()),
        ]

    @property
    def standings(self) -> tuple[NodeStanding, ...]:
        """All nodes that there are to be, prefill nodes first."""
        plans = sorted(self._plans.values(), key=lambda p: (p.role is Role.DECODE, number_of(p)))
        return tuple(map(self._standing, plans))

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

    # ---- orders -----------------------------------------------------------------------------

    async def _follow_orders(self) -> None:
        """Carry out what comes by the router, whichever incarnation of it runs."""
        while True:
            router = await self._running_router()
            try:
                placed = await router.next_order()
                answer = self._answer(placed)
                await self._tell(router)  # the status shows what the answer says
                await router.answer(answer)
            except PdserveError as error:  # its keeper is about to notice
                logger.warning("no orders come by the router: %s", error)
                await self._until_router_is_not(router)

    def _answer(self, placed: PlacedOrder) -> OrderAnswer:
        try:
            return OrderAnswer(number=placed.number, message=self._carry_out(placed.order))
        except PdserveError as error:
            return refusal(placed.number, error)

    def _carry_out(self, order: Order) -> str:
        """Begin what is asked; says what has begun. Raises InvalidRequestError."""
        match order:
            case Drain(node=name, undo=undo):
                return self._drain(name, undo=undo)
            case Scale():
                return self._scale(order)

    def _drain(self, name: str, *, undo: bool) -> str:
        if name not in self._plans:
            raise InvalidRequestError("node", f"got {name!r}, there are {', '.join(self._plans)}")
        if name in self._retiring:
            raise InvalidRequestError("node", f"{name} is being ended by an earlier `scale`")
        if undo:
            self._draining.discard(name)
            return f"{name} takes new requests"
        self._draining.add(name)
        return f"{name} takes nothing new and finishes what it holds"

    def _scale(self, order: Scale) -> str:
        kept = [plan for plan in self._plans.values() if plan.name not in self._retiring]
        change = change_for(order, kept, self._templates, set(self._plans))
        before = sum(plan.role == order.role for plan in kept)
        for plan in change.added:
            self._plans[plan.name] = plan
            self._keep(plan)
        for plan in change.removed:
            self._draining.add(plan.name)
            self._retiring[plan.name] = asyncio.create_task(self._retire(plan))
        verb, plans = ("starting", change.added) if change.added else ("ending", change.removed)
        names = ", ".join(plan.name for plan in plans)
        return f"{order.role}: {before} -> {order.count}" + (f"; {verb} {names}" if names else "")

    async def _retire(self, plan: NodePlan) -> None:
        """Let a node finish what it holds, end it and forget it."""
        keeper = self._node_keepers.pop(plan.name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if (node := self._nodes.get(plan.name)) is not None:
            await self._announce()
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await node.until_idle()
            except (TimeoutError, PdserveError) as error:
                logger.warning("%s did not drain: %r", plan.name, error)
            await node.close(0.0)
            del self._nodes[plan.name]
        del self._plans[plan.name], self._retiring[plan.name]
        self._draining.discard(plan.name)
        self._absent.pop(plan.name, None)
        await self._announce()
        self._on_event(f"{plan.name} has ended")

    # ---- nodes ------------------------------------------------------------------------------

    def _standing(self, plan: NodePlan) -> NodeStanding:
        name, node = plan.name, self._nodes.get(plan.name)
        if node is None:
            standing, reason = self._absent.get(name, (Standing.STARTING, None))
            return NodeStanding(name=name, role=plan.role, standing=standing, reason=reason)
        standing = Standing.DRAINING if name in self._draining else Standing.SERVING
        return NodeStanding(name=name, role=plan.role, standing=standing, address=node.address)

    def _keep(self, plan: NodePlan) -> None:
        self._node_keepers[plan.name] = asyncio.create_task(self._keep_node(plan))

    async def _stop_keeping(self) -> None:
        keepers = [*self._node_keepers.values(), *self._retiring.values(), *self._router_tasks]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        self._node_keepers, self._retiring, self._router_tasks = {}, {}, []

    async def _start_node(self, plan: NodePlan) -> None:
        node = await self._launcher.start_node(plan)
        self._nodes[plan.name] = node
        self._absent.pop(plan.name, None)
        await self._announce()

    async def _keep_node(self, plan: NodePlan) -> None:
        delays = _Delays(self._backoff, self._clock)
        while True:
            is_first = plan.name not in self._nodes and plan.name not in self._absent
            if (node := self._nodes.get(plan.name)) is not None:
                await self._lose_node(plan, node, await node.ended())
            if not is_first:
                await asyncio.sleep(delays.next_s())
                await self._note_absent(plan, Standing.STARTING, self._absent[plan.name][1])
            try:
                await self._start_node(plan)
            except PdserveError as error:
                self._on_event(f"{plan.name} did not start{'' if is_first else ' again'}: {error}")
                await self._note_absent(plan, Standing.LOST, str(error))
                continue
            delays.started()
            self._on_event(f"{plan.name} serves{'' if is_first else ' again'}")

    async def _lose_node(self, plan: NodePlan, node: RunningNode, error: PdserveError) -> None:
        self._on_event(f"{plan.name} ended: {error}; making it anew")
        await node.kill()
        del self._nodes[plan.name]  # only now: whoever cancels us still ends it
        await self._note_absent(plan, Standing.LOST, str(error))

    async def _note_absent(self, plan: NodePlan, standing: Standing, reason: str) -> None:
        self._absent[plan.name] = (standing, reason)
        await self._announce()

    # ---- the router -------------------------------------------------------------------------

    async def _start_router(self) -> None:
        self._router = await self._launcher.start_router()
        self._router_changed.set()
        await self._announce()

    async def _keep_router(self) -> None:
        delays = _Delays(self._backoff, self._clock)
        while True:
            if self._router is not None:
                error = await self._router.ended()
                self._on_event(f"router ended: {error}; making it anew")
                await self._router.kill()
                self._router = None
                self._router_changed.set()
            await asyncio.sleep(delays.next_s())
            try:
                await self._start_router()
            except PdserveError as error:
                self._on_event(f"router did not start again: {error}")
                continue
            delays.started()
            self._on_event("router serves again")

    async def _running_router(self) -> RunningRouter:
        while self._router is None:
            await self._router_change()
        return self._router

    async def _until_router_is_not(self, gone: RunningRouter) -> None:
        while self._router is gone:
            await self._router_change()

    async def _router_change(self) -> None:
        self._router_changed.clear()
        await self._router_changed.wait()

    async def _announce(self) -> None:
        """Tell decode nodes and router how all stand. One that hangs delays only itself."""
        listeners: list[Running] = [
            node for node in self._nodes.values() if node.address.role is Role.DECODE
        ]
        if self._router is not None:
            listeners.append(self._router)
        await asyncio.gather(*map(self._tell, listeners))

    async def _tell(self, listener: Running) -> None:
        """One at a time for each: the last word is the truth."""
        async with self._telling.setdefault(listener, asyncio.Lock()):
            try:
                await listener.set_nodes(self.standings)
            except PdserveError as error:  # its keeper is about to notice
                logger.warning("could not announce nodes: %s", error)


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
