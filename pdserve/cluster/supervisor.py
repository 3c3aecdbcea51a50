"""Keeps every node of a cluster and its router running, and everybody told of whom to talk to.

A node lives and dies whole: when any of its processes ends, all of them are ended, the others are
told, and the node is made anew as another incarnation while they serve.

    starting ── started ──> serving ── a process ended ──> ended whole ── back-off ──> starting
                             | | `───────── close ──────────────────────────────────> closed
                             | `── scaled down ──> draining ── idle ──> closed
                             `── role changed ──> draining ── idle ──> switching ──> serving

A node whose role was changed is made anew in its new role, whenever it ends.

An operator's orders come by the router, which is told how every node stands.

Owns which incarnations run. Knows neither Ray nor processes: a ``Launcher`` starts, a ``Running``
is watched and ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from pdserve.cluster.backoff import Backoff, Delays
from pdserve.cluster.launcher import Launcher, Running, RunningNode, RunningRouter
from pdserve.cluster.members import Members
from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.role_change import (
    Capacity,
    changed,
    check_capacity,
    max_choices,
    what_is_missing,
)
from pdserve.cluster.scaling import change_for
from pdserve.core.clock import Clock
from pdserve.core.errors import InvalidRequestError, PdserveError
from pdserve.core.node import NodeStanding, Role, Standing
from pdserve.core.orders import (
    ChangeRole,
    Drain,
    Order,
    OrderAnswer,
    PlacedOrder,
    Scale,
    refusal,
)

DRAIN_TIMEOUT_S = 900.0  # for the requests of a node that is scaled away or changes its role
SWITCH_TIMEOUT_S = 300.0  # for an idle node to serve in another role

logger = logging.getLogger(__name__)


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
        max_n: int,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> None:
        """``max_n``: choices of one request, as the router takes them."""
        self._launcher = launcher
        self._members = Members(plans)
        self._templates = {plan.role: plan for plan in reversed(plans)}
        self._clock = clock
        self._backoff = backoff
        self._on_event = on_event
        self._max_n = max_n
        self._drain_timeout_s = drain_timeout_s
        self._was_ready = False
        self._router: RunningRouter | None = None
        self._router_changed = asyncio.Event()  # for one reader, who clears it
        self._telling: WeakKeyDictionary[Running, asyncio.Lock] = WeakKeyDictionary()
        self._node_keepers: dict[str, asyncio.Task[None]] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._changing: dict[str, asyncio.Task[None]] = {}  # their role
        self._router_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the nodes side by side, then the router, and keep them all from then on.

        Raises the PdserveError of whatever could not start; the rest is ended then.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for plan in self._members.plans.values():
                    group.create_task(self._start_node(plan))
            await self._start_router()
        except BaseExceptionGroup as errors:
            await self.kill()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.kill()
            raise
        for name in self._members.plans:
            self._keep(name)
        self._router_tasks = [
            asyncio.create_task(self._keep_router()),
            asyncio.create_task(self._follow_orders()),
        ]

    def note_ready(self) -> None:
        """The cluster has been ready; routers made anew are told, whatever they find."""
        self._was_ready = True

    @property
    def standings(self) -> tuple[NodeStanding, ...]:
        """All nodes that there are to be, prefill nodes first."""
        return self._members.standings

    async def close(self, grace_s: float) -> None:
        """End the router first: its requests finish or are aborted. Then the nodes hold nothing."""
        await self._stop_keeping()
        if self._router is not None:
            await self._router.close(grace_s)
            self._router = None
        await asyncio.gather(*(node.close(0.0) for node in self._members.running.values()))
        self._members.running.clear()

    async def kill(self) -> None:
        """End everything at once."""
        await self._stop_keeping()
        running: list[Running] = list(self._members.running.values())
        if self._router is not None:
            running.append(self._router)
        await asyncio.gather(*(one.kill() for one in running))
        self._members.running.clear()
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
            case ChangeRole():
                return self._change_role(order)

    def _drain(self, name: str, *, undo: bool) -> str:
        self._check_free(name)
        if undo:
            self._members.draining.discard(name)
            return f"{name} takes new requests"
        others = [other for other in self.standings if other.name != name]
        problem = what_is_missing(self._members.plans[name], self._templates, others)
        self._members.draining.add(name)
        done = f"{name} takes nothing new and finishes what it holds"
        return done if problem is None else f"{done}. Mind: {problem}; --undo lets it in again"

    def _check_free(self, name: str) -> None:
        """There is such a node, and no order is being carried out on it."""
        if name not in self._members.plans:
            raise InvalidRequestError(
                "node", f"got {name!r}, there are {', '.join(self._members.plans)}"
            )
        if name in self._retiring:
            raise InvalidRequestError("node", f"{name} is being ended by an earlier `scale`")
        if name in self._changing:
            raise InvalidRequestError("node", f"{name} is changing its role by an earlier `role`")

    def _scale(self, order: Scale) -> str:
        kept = [plan for plan in self._members.plans.values() if plan.name not in self._retiring]
        change = change_for(order, kept, self._templates, set(self._members.plans))
        for plan in change.removed:
            self._check_free(plan.name)
        before = sum(plan.role == order.role for plan in kept)
        for plan in change.added:
            self._members.plans[plan.name] = plan
            self._keep(plan.name)
        for plan in change.removed:
            self._members.draining.add(plan.name)
            self._retiring[plan.name] = asyncio.create_task(self._retire(plan))
        verb, plans = ("starting", change.added) if change.added else ("ending", change.removed)
        names = ", ".join(plan.name for plan in plans)
        return f"{order.role}: {before} -> {order.count}" + (f"; {verb} {names}" if names else "")

    async def _retire(self, plan: NodePlan) -> None:
        """Let a node finish what it holds, end it and forget it."""
        keeper = self._node_keepers.pop(plan.name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if (node := self._members.running.get(plan.name)) is not None:
            await self._announce()
            try:
                async with asyncio.timeout(self._drain_timeout_s):
                    await node.until_idle()
            except (TimeoutError, PdserveError) as error:
                logger.warning("%s did not drain: %r", plan.name, error)
            await node.close(0.0)
            del self._members.running[plan.name]
        del self._retiring[plan.name]
        self._members.forget(plan.name)
        await self._announce()
        self._on_event(f"{plan.name} has ended")

    # ---- roles ------------------------------------------------------------------------------

    def _change_role(self, order: ChangeRole) -> str:
        name = order.node
        self._check_free(name)
        plan, standing = self._members.plans[name], self._members.standing(name)
        if (node := self._members.running.get(name)) is None:
            raise InvalidRequestError("node", f"{name} is {standing.standing}; try when it serves")
        others = [other for other in self.standings if other.name != name]
        wanted = changed(order, plan, self._templates, others)
        if wanted.role is Role.DECODE:
            own = Capacity(max_model_len=node.max_model_len, max_choices=max_choices(wanted))
            check_capacity(name, own, self._promised())
        self._members.plans[name] = wanted
        self._members.draining.add(name)
        self._changing[name] = asyncio.create_task(self._change(name, node, plan))
        return f"{name}: {plan.role} -> {wanted.role}, once it has finished what it holds"

    def _promised(self) -> Capacity:
        """What requests may need of every decode node."""
        decode = self._members.decoding
        plans = [self._members.plans[node.address.name] for node in decode]
        return Capacity(
            max_model_len=min((node.max_model_len for node in decode), default=0),
            max_choices=min([self._max_n, *map(max_choices, plans)]),
        )

    async def _change(self, name: str, node: RunningNode, before: NodePlan) -> None:
        """Have a node go on as its plan says now; should it end, its keeper does the rest."""
        try:
            outcome = await self._drained_and_switched(name, node, before)
        finally:
            del self._changing[name]
            self._members.draining.discard(name)
            self._members.switching.discard(name)
        await self._announce()
        self._on_event(outcome)

    async def _drained_and_switched(self, name: str, node: RunningNode, before: NodePlan) -> str:
        """What became of it."""
        plan = self._members.plans[name]
        await self._announce()
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await node.until_idle()
        except TimeoutError:
            self._members.plans[name] = before
            limit_s = self._drain_timeout_s
            return f"{name} stays a {before.role} node: it is not idle after {limit_s:g} s"
        except PdserveError as error:
            return f"{name} ended while it drained: {error}"
        self._members.switching.add(name)
        await self._announce()  # everybody leaves it
        try:
            async with asyncio.timeout(SWITCH_TIMEOUT_S):
                await node.switch(plan)
        except (TimeoutError, PdserveError) as error:
            await node.kill()
            return f"{name} did not become a {plan.role} node: {str(error) or 'it took too long'}"
        return f"{name} serves as a {plan.role} node"

    # ---- nodes ------------------------------------------------------------------------------

    def _keep(self, name: str) -> None:
        self._node_keepers[name] = asyncio.create_task(self._keep_node(name))

    async def _stop_keeping(self) -> None:
        keepers = [
            *self._node_keepers.values(),
            *self._retiring.values(),
            *self._changing.values(),
            *self._router_tasks,
        ]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        self._node_keepers, self._retiring, self._changing = {}, {}, {}
        self._router_tasks = []

    async def _start_node(self, plan: NodePlan) -> None:
        node = await self._launcher.start_node(plan)
        self._members.running[plan.name] = node
        self._members.absent.pop(plan.name, None)
        await self._announce()

    async def _keep_node(self, name: str) -> None:
        delays = Delays(self._backoff, self._clock)
        while True:
            is_first = name not in self._members.running and name not in self._members.absent
            if (node := self._members.running.get(name)) is not None:
                await self._lose_node(name, node, await node.ended())
            if not is_first:
                await asyncio.sleep(delays.next_s())
                await self._note_absent(name, Standing.STARTING, self._members.absent[name][1])
            try:
                await self._start_node(self._members.plans[name])
            except PdserveError as error:
                self._on_event(f"{name} did not start{'' if is_first else ' again'}: {error}")
                await self._note_absent(name, Standing.LOST, str(error))
                continue
            delays.started()
            self._on_event(f"{name} serves{'' if is_first else ' again'}")

    async def _lose_node(self, name: str, node: RunningNode, error: PdserveError) -> None:
        self._on_event(f"{name} ended: {error}; making it anew")
        await node.kill()
        del self._members.running[name]  # only now: whoever cancels us still ends it
        await self._note_absent(name, Standing.LOST, str(error))

    async def _note_absent(self, name: str, standing: Standing, reason: str) -> None:
        self._members.absent[name] = (standing, reason)
        await self._announce()

    # ---- the router -------------------------------------------------------------------------

    async def _start_router(self) -> None:
        self._router = await self._launcher.start_router(was_ready=self._was_ready)
        self._router_changed.set()
        await self._announce()

    async def _keep_router(self) -> None:
        delays = Delays(self._backoff, self._clock)
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
        listeners: list[Running] = [*self._members.decoding]
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
