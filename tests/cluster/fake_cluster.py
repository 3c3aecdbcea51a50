"""A launcher whose nodes are nothing but futures, for the supervisor's tests."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pdserve.cluster.resolve import NodePlan
from pdserve.core.errors import NodeLostError, PdserveError
from pdserve.core.node import NodeAddress, NodeStanding
from pdserve.core.orders import Order, OrderAnswer, PlacedOrder

T = TypeVar("T")


class FakeRunning:
    """Ends when its test says so, or when it is killed; remembers what it was told."""

    def __init__(self, address: NodeAddress | None) -> None:
        self._address = address
        self.max_model_len = 4096
        self.switched_to: list[NodePlan] = []
        self.switching = asyncio.Event()  # cleared: a change of role hangs
        self.switching.set()
        self.refuse_switch: PdserveError | None = None
        self.death: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        self.told: list[tuple[str, ...]] = []
        self.standings: tuple[NodeStanding, ...] = ()
        self.listening = asyncio.Event()  # cleared: it hangs
        self.listening.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.orders: asyncio.Queue[PlacedOrder] = asyncio.Queue()
        self.answers: asyncio.Queue[OrderAnswer] = asyncio.Queue()
        self.closed_with: list[float] = []
        self.num_kills = 0

    @property
    def address(self) -> NodeAddress:
        assert self._address is not None
        return self._address

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        """``told`` has the incarnations that run, whenever they are others than before."""
        if self.death.done():
            raise self.death.result()
        await self.listening.wait()
        self.standings = nodes
        incarnations = tuple(node.address.incarnation for node in nodes if node.address)
        if self.told[-1:] != [incarnations]:
            self.told.append(incarnations)

    async def until_idle(self) -> None:
        await self._unless_dead(self.idle.wait())

    async def switch(self, plan: NodePlan) -> None:
        self.switched_to.append(plan)
        await self._unless_dead(self.switching.wait())
        if self.refuse_switch is not None:
            raise self.refuse_switch
        number = len(self.switched_to)
        incarnation = f"{self.address.incarnation.partition('/')[0]}/{number}"
        self._address = replace(self.address, role=plan.role, incarnation=incarnation)

    async def next_order(self) -> PlacedOrder:
        return await self._unless_dead(self.orders.get())

    async def answer(self, answer: OrderAnswer) -> None:
        self.answers.put_nowait(answer)

    async def order(self, order: Order) -> OrderAnswer:
        """Place an order by this router and wait for its answer."""
        self.orders.put_nowait(PlacedOrder(number=7, order=order))
        async with asyncio.timeout(5):
            return await self.answers.get()

    async def ended(self) -> PdserveError:
        return await asyncio.shield(self.death)

    async def close(self, grace_s: float) -> None:
        self.closed_with.append(grace_s)

    async def kill(self) -> None:
        self.num_kills += 1
        if not self.death.done():
            self.death.set_result(NodeLostError("its process died"))

    async def _unless_dead(self, waiting: Awaitable[T]) -> T:
        """What comes of ``waiting``. Raises what it died of."""
        work = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((work, self.death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
        if self.death.done():
            raise self.death.result()
        return work.result()


@dataclass
class FakeLauncher:
    """Starts fakes; ``refuse`` maps a name to the errors of its next starts."""

    refuse: dict[str, list[PdserveError]] = field(default_factory=dict)
    nodes: dict[str, list[FakeRunning]] = field(default_factory=dict)
    routers: list[FakeRunning] = field(default_factory=list)
    was_ready: list[bool] = field(default_factory=list)  # as each router was told
    order: list[str] = field(default_factory=list)
    num_started: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def start_node(self, plan: NodePlan) -> FakeRunning:
        await self._refuse(plan.name)
        incarnations = self.nodes.setdefault(plan.name, [])
        address = NodeAddress(
            name=plan.name,
            role=plan.role,
            incarnation=f"{plan.name}#{len(incarnations)}",
            address="127.0.0.1:1",
        )
        incarnations.append(FakeRunning(address))
        await self._count(plan.name)
        return incarnations[-1]

    async def start_router(self, *, was_ready: bool) -> FakeRunning:
        await self._refuse("router")
        self.routers.append(FakeRunning(None))
        self.was_ready.append(was_ready)
        await self._count("router")
        return self.routers[-1]

    async def started(self, name: str, count: int) -> None:
        """Wait until ``name`` was started ``count`` times."""
        async with asyncio.timeout(5), self.num_started:
            await self.num_started.wait_for(lambda: self.order.count(name) >= count)

    async def _refuse(self, name: str) -> None:
        await asyncio.sleep(0)
        if errors := self.refuse.get(name):
            raise errors.pop(0)

    async def _count(self, name: str) -> None:
        async with self.num_started:
            self.order.append(name)
            self.num_started.notify_all()
