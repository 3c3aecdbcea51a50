"""Runs one schedule from its first start to the last free block, and says what was wrong.

The router, the decode nodes and the prefill nodes are the real ones, with the sessions between
them; below are the ranks of ``tests/fabric.py``, around are clients who know the right answers.
"""

import asyncio
from collections.abc import Callable, Hashable
from pathlib import Path

from decode_node.node import DecodeNode
from pdserve.core.node import Role
from pdserve.text.tokenizer import Tokenizer
from router.delivery import MAX_TRIES
from tests.fabric import Fabric
from tests.oracle import FakeModel
from tests.prompts import VOCAB_SIZE
from tests.simulation.bounds import Bounds
from tests.simulation.clients import Client, make_client
from tests.simulation.faults import Faults
from tests.simulation.holdings import Holdings
from tests.simulation.hosts import NodeHost, RouterHost, addresses
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import MemoryNetwork
from tests.simulation.pipes import Wires
from tests.simulation.post import LatePost
from tests.simulation.schedule import Kind, Schedule, Wish

LOOK_S = 0.1  # between two looks at what is waited for
HEAL_S = 150.0  # back-offs and trials of breakers included
SETTLE_S = 2.0  # who was stopped hears what has come meanwhile
IDLE_S = 5.0  # from the last answer to the last free block
PROBE_LENS = (13, 30, 1)  # of prompts that are asked when all is well again
SLOWEST = 10  # times that a token may be computed, as it were
LOST_NODE = {"node_lost_error", "no_node_error", "rank_error"}


class Simulation:
    """``run`` raises AssertionError for whatever must not be."""

    def __init__(self, schedule: Schedule, model_dir: Path) -> None:
        self.schedule = schedule
        self.loop = VirtualLoop()
        self.clients: list[Client] = []
        cluster, longest_s, seed = schedule.cluster, schedule.longest_s, schedule.seed
        self._tokenizer = Tokenizer(model_dir)
        self._model = FakeModel(VOCAB_SIZE)
        self._network = MemoryNetwork(Wires(self.loop, longest_s=longest_s, seed=seed))
        post = LatePost(self.loop, longest_s=longest_s, seed=seed, brought=self._check)
        self._fabric = Fabric(post, self._model)
        names = [f"decode-{i}" for i in range(cluster.num_decode)]
        names += [f"prefill-{i}" for i in range(cluster.num_prefill)]
        self.nodes = {
            name: NodeHost(name, cluster, self.loop, self._network, self._fabric) for name in names
        }
        self.routers = [
            RouterHost(f"router-{i}", cluster, model_dir, self.loop, self._network)
            for i in range(cluster.num_routers)
        ]
        self.faults = Faults(
            self.loop, self._network, self._fabric, self.nodes, self.routers, self._tell
        )
        self._bounds = Bounds(
            self.loop,
            self._network.wires,
            Holdings(self.nodes, self.routers, self.clients).unwanted,
            {**self.nodes, **{router.name: router for router in self.routers}},
        )

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
            self._check_problems()
        finally:
            self._network.wires.is_over = True
            self.loop.close_down()

    # ---- from start to end ------------------------------------------------------------------

    async def _run(self) -> None:
        for node in self.nodes.values():
            await node.start()
            self.faults.watch(node)
        for router in self.routers:
            await router.start()
        self._tell()
        await self._until(self._is_whole, HEAL_S, "the cluster comes up")
        began_s = self.loop.time()
        for wish in self.schedule.wishes:
            self.loop.call_at(began_s + wish.at_s, self._ask, wish)
        for fault in self.schedule.faults:
            self.faults.plan(fault)
        await self._until(self._are_over, self._longest_run_s(), "every request ends")
        for client in self.clients:
            self._check_error(client)
        await self._until(self._is_whole, HEAL_S, "the cluster heals", stays_s=SETTLE_S)
        await self._until(self._is_idle, IDLE_S, "everything is free")
        for prompt_len in PROBE_LENS:
            await self._probe(prompt_len)
            await self._until(self._is_idle, IDLE_S, "everything is free")
        self._check_idle()

    def _ask(self, wish: Wish) -> None:
        router = self.routers[wish.router % len(self.routers)]
        cluster = self.schedule.cluster
        number = len(self.clients)
        client = make_client(self._model, self._tokenizer, cluster, wish, number)
        self.clients.append(client)
        if router.service is None:
            client.lose()
            return
        process = router.process
        asking = process.run(client.ask(router.service, process.now_s()), "call")
        asking.add_done_callback(client.end)
        if wish.leaves_s is not None:
            self.loop.call_later(wish.leaves_s, self._leave, client, asking)

    def _leave(self, client: Client, asking: "asyncio.Task[None]") -> None:
        client.has_left = True
        asking.cancel()
        self.loop.call_soon(self._bounds.look)

    async def _probe(self, prompt_len: int) -> None:
        """After all that, a request to each router is answered, and rightly."""
        num_before = len(self.clients)
        for i in range(len(self.routers)):
            self._ask(Wish(at_s=0, router=i, prompt_len=prompt_len, max_tokens=6))
        probes = self.clients[num_before:]
        within_s = self._longest_run_s()
        await self._until(lambda: all(p.is_over for p in probes), within_s, "the next ones end")
        is_short = self.schedule.cluster.request_timeout_s is not None
        allowed = {None, "request_timeout_error"} if is_short else {None}
        errors = [probe.error for probe in probes]
        assert allowed.issuperset(errors), f"the next ones fail: {errors}"

    # ---- what must hold ---------------------------------------------------------------------

    def _check(self, queue: Hashable) -> None:
        """After anything that ranks do."""
        assert isinstance(queue, tuple)
        host = self.nodes.get(str(queue[0]).partition("#")[0])
        if host is not None:
            host.check()
        self._bounds.look_sometimes()

    def _check_error(self, client: Client) -> None:
        """An error says the truth: what happened could do that."""
        if client.error is not None:
            assert client.error in self._allowed_errors(), f"{client.error} for {client.wish}"

    def _allowed_errors(self) -> set[str]:
        cluster, faults = self.schedule.cluster, self.schedule.faults
        allowed = set()
        if cluster.max_queued is not None:
            allowed |= {"overloaded_error", "never_fits_error"}
        if cluster.queue_timeout_s is not None:
            allowed.add("queue_deadline_error")
        if cluster.request_timeout_s is not None:
            allowed |= {"queue_deadline_error", "request_timeout_error"}
        if any(fault.kind is Kind.KILL_ROUTER for fault in faults):
            allowed.add("connection lost")
        disturbed = self.faults.disturbed
        if len(set(disturbed)) == cluster.num_decode or len(disturbed) >= MAX_TRIES:
            allowed |= LOST_NODE
        return allowed

    def _check_problems(self) -> None:
        problems = [*self.loop.problems, *self._network.faults, *self.faults.problems]
        assert not problems, "\n".join(problems)

    def _are_over(self) -> bool:
        for client, router in ((c, self._router_of(c)) for c in self.clients):
            if router.service is None:
                client.lose()
        is_all = len(self.clients) == len(self.schedule.wishes)
        return is_all and all(client.is_over for client in self.clients)

    def _is_whole(self) -> bool:
        """All faults have healed, and everybody knows."""
        if self.faults.num_open or any(n.running is None for n in self.nodes.values()):
            return False
        prefills = [n.name for n in self.nodes.values() if n.role is Role.PREFILL]
        for node in (host.node for host in self.nodes.values()):
            if isinstance(node, DecodeNode):
                working = node.status([]).connected_prefill_nodes
                if list(working) != sorted(prefills):
                    return False
        return all(self._knows_all(router) for router in self.routers)

    def _knows_all(self, router: RouterHost) -> bool:
        if router.service is None:
            return False
        views = router.service.channels.views()
        return len(views) == len(self.nodes) and all(
            view.ready and view.address == self.nodes[view.name].address for view in views
        )

    def _check_idle(self) -> None:
        for node in self.nodes.values():
            node.check_idle()
        for router in self.routers:
            router.check_idle()

    def _is_idle(self) -> bool:
        try:
            self._check_idle()
        except AssertionError:
            return False
        return True

    # ---- private ----------------------------------------------------------------------------

    def _router_of(self, client: Client) -> RouterHost:
        return self.routers[client.wish.router % len(self.routers)]

    def _tell(self) -> None:
        """Nodes have come or gone: whoever must know is told."""
        standings = [node.standing() for node in self.nodes.values()]
        for router in self.routers:
            router.tell(standings)
        prefills = addresses(self.nodes.values(), Role.PREFILL)
        for node in self.nodes.values():
            node.connect(prefills)

    def _longest_run_s(self) -> float:
        """More is a hang."""
        num_tokens = sum(
            w.num_prompts * w.num_choices * (w.prompt_len + w.max_tokens)
            for w in self.schedule.wishes
        )
        return HEAL_S + SLOWEST * self.schedule.longest_s * (num_tokens + 20)

    async def _until(
        self, is_so: Callable[[], bool], within_s: float, what: str, *, stays_s: float = 0.0
    ) -> None:
        """Wait until it has been so at every look for ``stays_s``."""
        until_s = self.loop.time() + within_s
        since_s = self.loop.time()
        while True:
            since_s = since_s if is_so() else self.loop.time() + LOOK_S
            if self.loop.time() - since_s >= stays_s:
                return
            self._check_problems()
            self._bounds.look()
            assert self.loop.time() < until_s, f"not within {within_s:g} s: {what}"
            await asyncio.sleep(LOOK_S)


def simulate(schedule: Schedule, model_dir: Path) -> Simulation:
    """Run it; what is wrong is raised."""
    simulation = Simulation(schedule, model_dir)
    simulation.run()
    return simulation
