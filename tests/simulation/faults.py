"""How a fault of a schedule is done to what runs, and which of the decode nodes it may disturb."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from functools import partial

from pdserve.core.errors import PdserveError, RankError
from pdserve.core.node import Role
from tests.fabric import Fabric
from tests.simulation.hosts import NodeHost, RouterHost
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import MemoryNetwork
from tests.simulation.schedule import Fault, Kind

RESTART_S = 0.5  # until a node or a router that is gone is made anew
FLAP_S, BAD_S = 0.3, 0.02  # between two breaks of a connection, and of handoffs
FAILURES = ("checksum_error", "transfer_timeout_error", "transfer_error")


class Faults:
    """Does faults, and keeps what runs running. ``changed`` is called when nodes come or go."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: MemoryNetwork,
        fabric: Fabric,
        nodes: dict[str, NodeHost],
        routers: list[RouterHost],
        changed: Callable[[], None],
    ) -> None:
        self.disturbed: list[str] = []  # decode nodes, once for each time
        self.num_open = 0  # faults that have not healed
        self.problems: list[str] = []
        self._loop = loop
        self._network = network
        self._fabric = fabric
        self._nodes = nodes
        self._routers = routers
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()

    def plan(self, fault: Fault) -> None:
        """Do it at its time, from now on; it heals by itself."""
        self._later(fault.at_s, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        if fault.kind in (Kind.HOLD, Kind.CUT_SESSION, Kind.FLAP):
            self._begin_between(fault, *self._pair(fault))
        elif fault.kind is Kind.BAD_LINKS:
            self._fail_handoffs(fault.node, self._loop.time() + fault.lasts_s)
        elif fault.kind is Kind.FAIL_HANDOFF:
            self._fail_handoff(fault)
        elif fault.kind is Kind.CUT_KV:
            self._cut_kv(fault)
        elif fault.kind in (Kind.STOP_ROUTER, Kind.KILL_ROUTER):
            self._begin_at_router(fault, self._routers[fault.node % len(self._routers)])
        else:
            self._begin_at_node(fault, list(self._nodes.values())[fault.node % len(self._nodes)])

    def _begin_between(self, fault: Fault, one: str, other: str) -> None:
        self._disturb(one, other)
        if fault.kind is Kind.HOLD:
            self._network.wires.hold(one, other, fault.lasts_s)
            self._later(fault.lasts_s, self._changed)
        elif fault.kind is Kind.FLAP:
            self._flap(one, other, self._loop.time() + fault.lasts_s)
        else:
            self._network.cut(one, other)

    def _flap(self, one: str, other: str, until_s: float) -> None:
        self._disturb(one, other)
        self._network.cut(one, other)
        if self._loop.time() < until_s:
            self._later(FLAP_S, self._flap, one, other, until_s)

    def _begin_at_node(self, fault: Fault, node: NodeHost) -> None:
        self._disturb(node.name)
        match fault.kind:
            case Kind.DRAIN:
                self._drain(node, True)
                self._later(fault.lasts_s, self._drain, node, False)
            case Kind.STOP:
                node.process.stop()
                self._later(fault.lasts_s, node.process.go_on)
            case Kind.RESTART if node.running is not None:
                self._run(self._restart(node, fault.lasts_s / 8))
            case Kind.LOSE_RANKS if node.running is not None:
                node.ranks.fail(RankError("rank 0 died"))
            case Kind.KILL if node.running is not None:
                self._run(self._make_anew(node, fault.lasts_s / 4))

    def _begin_at_router(self, fault: Fault, router: RouterHost) -> None:
        self._disturb(*self._nodes)
        if fault.kind is Kind.STOP_ROUTER:
            router.process.stop()
            self._later(fault.lasts_s, router.process.go_on)
        elif router.service is not None:
            self._run(self._make_router_anew(router))

    def watch(self, node: NodeHost) -> None:
        """Make the node anew when it says that it can not go on."""
        assert node.running is not None
        process = node.process

        def failed(future: "asyncio.Future[PdserveError]") -> None:
            error = future.result()
            if not isinstance(error, RankError):
                self.problems.append(f"{node.name} failed: {error!r}")
            if node.process is process and not process.is_dead:
                self._run(self._make_anew(node, RESTART_S))

        node.running.failed.add_done_callback(failed)

    # ---- private ----------------------------------------------------------------------------

    def _pair(self, fault: Fault) -> tuple[str, str]:
        """Two that speak to each other."""
        routers = [router.name for router in self._routers]
        decodes, prefills = (
            [node.name for node in self._nodes.values() if node.role is role]
            for role in (Role.DECODE, Role.PREFILL)
        )
        pairs = [
            *itertools.product(routers, decodes),
            *itertools.product(decodes, prefills),
            *itertools.product(routers, prefills),
        ]
        return pairs[(fault.node * 6 + fault.other) % len(pairs)]

    def _disturb(self, *names: str) -> None:
        self.disturbed += [name for name in names if name.startswith("decode")]

    def _drain(self, node: NodeHost, is_draining: bool) -> None:
        node.is_draining = is_draining
        self._changed()

    def _fail_handoff(self, fault: Fault) -> None:
        endpoints = [
            endpoint
            for node in self._nodes.values()
            if node.running is not None
            for endpoint in node.ranks.endpoints
        ]
        ways = [partial(e.fail_send, handoff) for e in endpoints for handoff in e.sending]
        ways += [partial(e.fail_receive, handoff) for e in endpoints for handoff in e.receiving]
        if ways:
            ways[fault.node % len(ways)](FAILURES[fault.other % len(FAILURES)])

    def _fail_handoffs(self, number: int, until_s: float) -> None:
        """All that one prefill node sends now, and what it begins until then."""
        prefills = [node for node in self._nodes.values() if node.role is Role.PREFILL]
        node = prefills[number % len(prefills)] if prefills else None
        if node is not None and node.running is not None:
            for endpoint in node.ranks.endpoints:
                for handoff in endpoint.sending:
                    endpoint.fail_send(handoff)
        if self._loop.time() < until_s:
            self._later(BAD_S, self._fail_handoffs, number, until_s)

    def _cut_kv(self, fault: Fault) -> None:
        nodes = [node for node in self._nodes.values() if node.running is not None]
        decodes = [node for node in nodes if node.role is Role.DECODE]
        prefills = [node for node in nodes if node.role is Role.PREFILL]
        if decodes and prefills:
            self._fabric.cut(
                decodes[fault.node % len(decodes)].ranks.incarnation,
                prefills[fault.other % len(prefills)].ranks.incarnation,
            )

    async def _restart(self, node: NodeHost, grace_s: float) -> None:
        """The node is closed in order; it may be stopped or killed meanwhile."""
        if node.running is None:  # gone at this very time
            return
        process = node.process
        node.is_closing = True
        closing = process.run(node.running.close(grace_s), "close")
        dying = self._loop.create_task(process.died.wait())
        await asyncio.wait([closing, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if node.process is process and not process.is_dead:
            await self._make_anew(node, RESTART_S)

    async def _make_anew(self, node: NodeHost, pause_s: float) -> None:
        if node.running is None:
            return
        node.kill()
        self._changed()
        await asyncio.sleep(pause_s)
        await node.start()
        self.watch(node)
        self._changed()

    async def _make_router_anew(self, router: RouterHost) -> None:
        if router.service is None:
            return
        router.kill()
        self._changed()
        await asyncio.sleep(RESTART_S)
        await router.start()
        self._changed()

    def _later(self, pause_s: float, act: Callable[..., object], *args: object) -> None:
        self.num_open += 1
        self._loop.call_later(pause_s, self._heal, act, args)

    def _heal(self, act: Callable[..., object], args: tuple[object, ...]) -> None:
        self.num_open -= 1
        act(*args)

    def _run(self, work: Coroutine[object, object, None]) -> None:
        self.num_open += 1
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self.num_open -= 1
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"a fault could not be done: {error!r}")
