"""Starts nodes and the router as Ray actors: a ``Launcher`` for the supervisor.

Front and ranks of a node start side by side; the front meets the ranks in a directory of their
host's shared memory. A start that fails or is cancelled leaves nothing running.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup

from pdserve.cluster import placement
from pdserve.cluster.actors import CALL_THREADS, FrontActor, RankActor
from pdserve.cluster.front import NodeFacts, RouterAddress
from pdserve.cluster.front_pulse import FrontWatch
from pdserve.cluster.incarnation import Incarnation, new_incarnation_id
from pdserve.cluster.ray_head import RayHead
from pdserve.cluster.ray_processes import CONTROL_TIMEOUT_S, Process, ProcessGroup
from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.site import RouterStart, Site
from pdserve.core.errors import NodeLostError, PdserveError, RayLostError
from pdserve.core.node import NodeAddress, NodeStanding
from pdserve.core.orders import OrderAnswer, PlacedOrder
from pdserve.core.starvation import KernelStarvation, ProcessId

PLACEMENT_TIMEOUT_S = 120.0  # for Ray to find room and start a process
START_TIMEOUT_S = 600.0  # for the ranks to load the model
STEP_TIMEOUT_S = 120.0  # a step that takes longer hangs

Facts = TypeVar("Facts")

_RankActor = ray.remote(RankActor)
_FrontActor = ray.remote(FrontActor)


class RayFront(Generic[Facts]):
    """A node or the router that runs: ``Running``, and where it listens."""

    def __init__(
        self, facts: Facts, front: Process, processes: ProcessGroup, watch: FrontWatch
    ) -> None:
        self.facts = facts
        self._front = front
        self._processes = processes
        self._watch = watch

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        await self._front.control("set_nodes", nodes, timeout_s=CONTROL_TIMEOUT_S)

    @property
    def address(self) -> NodeAddress:
        """Of a node."""
        return cast(NodeFacts, self.facts).address

    @property
    def max_model_len(self) -> int:
        """Of a node."""
        return cast(NodeFacts, self.facts).max_model_len

    async def until_idle(self) -> None:
        """Of a node."""
        call = self._front.start_call("until_idle")
        await self._processes.answer_unless_ended(self._front, call)

    async def switch(self, plan: NodePlan) -> None:
        """Of a node."""
        call = self._front.start_call("switch", new_incarnation_id(plan.name), plan)
        self.facts = await self._processes.answer_unless_ended(self._front, call)

    async def next_order(self) -> PlacedOrder:
        placed = await self._front.answer(self._front.start_call("next_order"))
        assert isinstance(placed, PlacedOrder)
        return placed

    async def answer(self, answer: OrderAnswer) -> None:
        await self._front.control("answer", answer, timeout_s=CONTROL_TIMEOUT_S)

    async def ended(self) -> PdserveError:
        signs = [
            asyncio.create_task(self._processes.ended()),
            asyncio.create_task(self._watch.silent(self._front)),
        ]
        try:
            done, _ = await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for sign in signs:
                sign.cancel()
        return next(sign.result() for sign in signs if sign in done)

    async def close(self, grace_s: float) -> None:
        await self._processes.close(self._front, grace_s)

    async def kill(self) -> None:
        await self._processes.kill()


class RayLauncher:
    """A ``Launcher``. Says where each thing runs once it does."""

    def __init__(self, site: Site, head: RayHead, say: Callable[[str, str], None]) -> None:
        self._site = site
        self._head = head
        self._say = say
        self._log_format = site.cluster.config.observability.log_format
        # Making a node anew costs more than going on elsewhere, which others do after silence_s.
        self._silence_s = 2 * site.cluster.config.network.silence_s
        self._starvation = KernelStarvation()

    async def start_node(self, plan: NodePlan) -> RayFront[NodeFacts]:
        await self._check_ray()
        incarnation = Incarnation(
            id=new_incarnation_id(plan.name),
            site=self._site,
            plan=plan,
            start_timeout_s=START_TIMEOUT_S,
            step_timeout_s=STEP_TIMEOUT_S,
        )
        group = placement.place(plan)
        front = self._front(plan.name, placement.front_options(group))
        ranks = [self._rank(group, plan, rank) for rank in range(plan.pool.tensor_parallel_size)]
        processes = ProcessGroup([front, *ranks], group, self._head)
        for rank, process in enumerate(ranks):
            processes.watch(process, process.start_call("run", incarnation, rank))
        began_s = time.monotonic()
        node = await self._start(front, processes, "node", incarnation)
        self._say(
            plan.name, f"{_describe(plan, node.address)} ({time.monotonic() - began_s:.1f} s)"
        )
        return node

    async def start_router(self, *, was_ready: bool) -> RayFront[RouterAddress]:
        await self._check_ray()
        router = self._front("router", placement.router_options())
        processes = ProcessGroup([router], None, self._head)
        order = RouterStart(site=self._site, was_ready=was_ready)
        running = await self._start(router, processes, "router", order)
        address = running.facts
        scheme = self._site.cluster.config.security.scheme
        self._say("router", f"HTTP {scheme}://{address.http}, gRPC {address.grpc}")
        return running

    async def _check_ray(self) -> None:
        if not await self._head.usable():
            raise RayLostError("Ray is gone")

    async def _start(
        self, front: Process, processes: ProcessGroup, entry: str, order: object
    ) -> RayFront[Any]:
        """Start a front whose ranks start meanwhile; end them all if any of them fails."""
        try:
            process = await _wait_for_process(front)
            async with asyncio.timeout(START_TIMEOUT_S):
                facts = await processes.answer_unless_ended(
                    front, front.start_call("start", entry, order)
                )
        except BaseException as error:
            await asyncio.shield(processes.kill())
            if isinstance(error, TimeoutError):
                raise NodeLostError(
                    f"{front.name}: did not start in {START_TIMEOUT_S:g} s"
                ) from error
            raise
        processes.watch(front, front.start_call("ended"))
        watch = FrontWatch(process=process, limit_s=self._silence_s, starvation=self._starvation)
        return RayFront(facts, front, processes, watch)

    def _front(self, name: str, options: dict[str, Any]) -> Process:
        actor = _FrontActor.options(max_concurrency=CALL_THREADS, **options).remote(
            self._site.log_folder, name, self._log_format
        )
        return Process(name, actor)

    def _rank(self, group: PlacementGroup, plan: NodePlan, rank: int) -> Process:
        name = f"{plan.name}.rank-{rank}"
        options = placement.rank_options(group, plan, rank)
        actor = _RankActor.options(**options).remote(self._site.log_folder, name, self._log_format)
        return Process(name, actor)


async def _wait_for_process(front: Process) -> ProcessId:
    try:
        process = await front.control("process_id", timeout_s=PLACEMENT_TIMEOUT_S)
    except NodeLostError as error:
        raise NodeLostError(
            f"{error}; has a host of the Ray cluster room for the whole node?"
        ) from error
    assert isinstance(process, ProcessId)
    return process


def _describe(plan: NodePlan, address: NodeAddress) -> str:
    num_ranks = plan.pool.tensor_parallel_size
    return f"{address.address}, {num_ranks} rank{'s' if num_ranks > 1 else ''} on {plan.device}"
