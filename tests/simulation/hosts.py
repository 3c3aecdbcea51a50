"""What runs in a simulation: the nodes and the routers, each through all of its starts."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from decode_node.node import DecodeNode
from decode_node.server import RunningDecodeNode, start_decode_node
from pdserve.core.config import (
    DecodeConfig,
    LimitsConfig,
    PrefillConfig,
    PromptClass,
    RouterConfig,
)
from pdserve.core.errors import RankError
from pdserve.core.node import NodeAddress, NodeStanding, Role, Standing
from pdserve.core.routing_config import ConditionalConfig, PrefixConfig
from pdserve.rank.running_node import RunningNode
from prefill_node.node import PrefillNode
from prefill_node.server import start_prefill_node
from router.routing import Ask
from router.server import make_service
from router.service import RouterSpec, Service
from tests.fabric import Fabric, FabricRanks, make_layout
from tests.nodes.specs import MODEL, make_spec
from tests.pools import empty_blocks
from tests.simulation.loop import Life, Process, VirtualLoop
from tests.simulation.network import MemoryNetwork
from tests.simulation.schedule import Cluster

SILENCE_S = 3.0


def decode_config(cluster: Cluster) -> DecodeConfig:
    return DecodeConfig(
        tensor_parallel_size=cluster.decode_tp,
        max_num_seqs=cluster.max_num_seqs,
        max_num_batched_tokens=cluster.max_num_batched_tokens,
        local_prefill_tokens=cluster.local_prefill_tokens,
        fallback_chunk=cluster.fallback_chunk,
        headroom_tokens=cluster.headroom_tokens,
        enable_prefix_caching=cluster.caching,
    )


def prefill_config(cluster: Cluster) -> PrefillConfig:
    return PrefillConfig(
        tensor_parallel_size=cluster.prefill_tp,
        max_num_seqs=3,
        max_num_batched_tokens=cluster.prefill_chunk,
        enable_prefix_caching=cluster.caching,
    )


def router_config(cluster: Cluster) -> RouterConfig:
    limits = LimitsConfig(
        kv_watermark=cluster.kv_watermark,
        max_sent_ahead=cluster.max_sent_ahead,
        max_prefill_wait_s=cluster.max_prefill_wait_s,
        request_timeout_s=cluster.request_timeout_s or LimitsConfig().request_timeout_s,
    )
    prompt_class = PromptClass(
        name="all", max_queued=cluster.max_queued, queue_timeout_s=cluster.queue_timeout_s
    )
    return RouterConfig(
        policy=cluster.policy,
        classes=(prompt_class,),
        local_prefill_below=cluster.local_prefill_below,
        prefix=PrefixConfig(block_size=4),
        conditional=ConditionalConfig(enabled=cluster.conditional),
        limits=limits,
    )


class NodeHost:
    """One node by its name. ``process``, ``ranks`` and ``running`` are those of its last start."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        loop: VirtualLoop,
        network: MemoryNetwork,
        fabric: Fabric,
    ) -> None:
        self.name = name
        self.role = Role.DECODE if name.startswith("decode") else Role.PREFILL
        self.is_draining = False
        self.is_closing = False
        self.running: RunningNode | RunningDecodeNode | None = None  # None: it is being made
        self.process: Process
        self.ranks: FabricRanks
        self._cluster = cluster
        self._loop = loop
        self._network = network
        self._fabric = fabric
        self._num_starts = 0

    @property
    def address(self) -> NodeAddress | None:
        return self.running.address if self.running is not None else None

    @property
    def is_working(self) -> bool:
        """It does at once what there is to do."""
        is_up = self.running is not None and self.process.life is Life.RUNNING
        return is_up and not self.is_closing and not self.ranks.failed.done()

    @property
    def can_act(self) -> bool:
        """Nothing that it should do waits for it."""
        return self.running is None or self.is_working

    @property
    def node(self) -> DecodeNode | PrefillNode:
        assert self.running is not None
        node = self.running.node
        assert isinstance(node, DecodeNode | PrefillNode)
        return node

    async def start(self) -> None:
        """Another incarnation, in a process of its own."""
        self._num_starts += 1
        self.is_closing = False
        self.process = self._loop.process(self.name)
        self.running = await self.process.run(self._start(self.process), "start")

    def kill(self) -> None:
        """Front and ranks are dead at once; the others notice what they notice."""
        self.process.die()
        self._network.process_lost(self.process)
        self.ranks.fail(RankError("killed"))
        self.running = None

    def standing(self) -> NodeStanding:
        standing = Standing.DRAINING if self.is_draining else Standing.SERVING
        if self.running is None:
            standing = Standing.LOST
        return NodeStanding(name=self.name, role=self.role, standing=standing, address=self.address)

    def connect(self, prefills: Iterable[NodeAddress]) -> None:
        """Tell a decode node which prefill nodes there are."""
        if isinstance(self.running, RunningDecodeNode):
            self.process.call(self.running.set_prefill_nodes, tuple(prefills))

    def check(self) -> None:
        """What holds at any time; then blocks that hold nothing are made unreadable."""
        if self.running is None:
            return
        pool = self.node.scheduler.ledger.pool
        pool.check()
        in_use = set(self.ranks.blocks_in_use())
        assert all(pool.num_owners(block) for block in in_use), "freed while in use"
        self.ranks.executor.poison(empty_blocks(pool))

    def check_idle(self) -> None:
        """Nothing is held but for a trial step of the idle node, and nobody is waited for."""
        node, ledger = self.node, self.node.scheduler.ledger
        stepping = [sequence for step in ledger._in_flight for sequence in step.sequences]
        assert all(s.key.request_id.startswith("trial-") for s in stepping)
        num_held = sum(len(sequence.blocks) for sequence in stepping)
        num_free = ledger.pool.num_free + num_held
        assert num_free == ledger.pool.num_blocks, f"{self.name}: blocks are lost"
        assert ledger.num_draining_blocks == 0
        assert ledger.num_free_slots + len(stepping) == node.spec.pool.max_num_seqs
        assert node.scheduler.num_waiting == node.scheduler.num_running == 0
        if isinstance(node, DecodeNode):
            assert node.num_requests == len(node.legs) == 0
        else:
            assert node.num_prefills == 0

    async def _start(self, process: Process) -> RunningNode | RunningDecodeNode:
        cluster = self._cluster
        is_decode = self.role is Role.DECODE
        config = decode_config(cluster) if is_decode else prefill_config(cluster)
        size = cluster.decode_block_size if is_decode else cluster.prefill_block_size
        spec = make_spec(
            self.name, config, start=self._num_starts, block_size=size, depth=cluster.depth
        )
        self.ranks = self._fabric.start(
            spec.incarnation,
            make_layout(block_size=size, tp_size=config.tensor_parallel_size),
            num_blocks=cluster.decode_blocks if is_decode else cluster.prefill_blocks,
            num_slots=config.max_num_seqs,
        )
        start = start_decode_node if is_decode else start_prefill_node
        return await start(spec, self.ranks, process, silence_s=SILENCE_S, network=self._network)


class RouterHost:
    """One router's place. ``process`` and ``service`` are those of its last start."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        model_dir: Path,
        loop: VirtualLoop,
        network: MemoryNetwork,
    ) -> None:
        self.name = name
        self.service: Service | None = None  # None: it is being made
        self.process: Process
        self._loop = loop
        self._network = network
        self._ids = itertools.count(1)
        self._spec = RouterSpec(
            config=router_config(cluster),
            served_name="tiny",
            model_dir=model_dir,
            model=MODEL,
            dtype="float32",
            max_model_len=None,
            headroom_tokens=cluster.headroom_tokens,
            prefill_configured=cluster.num_prefill > 0,
            caching=frozenset(Role) if cluster.caching else frozenset(),
        )

    @property
    def is_working(self) -> bool:
        """It does at once what there is to do."""
        return self.service is not None and self.process.life is Life.RUNNING

    @property
    def can_act(self) -> bool:
        """Nothing that it should do waits for it."""
        return self.service is None or self.is_working

    async def start(self) -> None:
        self.process = self._loop.process(self.name)
        self.service = await self.process.run(self._start(self.process), "start")

    def kill(self) -> None:
        self.process.die()
        self._network.process_lost(self.process)
        self.service = None

    def tell(self, standings: Iterable[NodeStanding]) -> None:
        """How the cluster's nodes stand."""
        if self.service is not None:
            self.process.call(self.service.roster.set, tuple(standings))

    def check_idle(self) -> None:
        """Nothing runs or waits, and nothing is counted for what is over."""
        assert self.service is not None
        assert self.service.dispatcher.num_running == 0
        assert all(q.num_waiting == 0 for q in self.service.dispatcher.queues().queues)
        loads = self.service.route(Ask(num_tokens=1)).loads
        for decode in loads.decode:
            assert decode.num_requests == decode.context_tokens == decode.queued_tokens == 0
        assert all(prefill.queued_tokens == 0 for prefill in loads.prefill)

    async def _start(self, process: Process) -> Service:
        service = make_service(self._spec, process, SILENCE_S, self._network, new_id=self._new_id)
        process.run(service.dispatcher.run(service.channels.news), "dispatcher")
        return service

    def _new_id(self) -> str:
        return f"{self.name}/{next(self._ids)}"


def addresses(hosts: Iterable[NodeHost], role: Role) -> list[NodeAddress]:
    """Of the nodes of a role that run."""
    found = (host.address for host in hosts if host.role is role)
    return [address for address in found if address is not None]
