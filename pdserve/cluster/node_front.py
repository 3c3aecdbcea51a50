"""The front of a node in its process: ranks are met, and a node of either role works with them.

    ranks ── start ──> node ── hand over ──> ranks ── start ──> node of the other role

What is known of the ranks' costs stays; what the new role needs is measured before it serves.
"""

import asyncio
import logging
from dataclasses import replace

from decode_node.server import RunningDecodeNode, start_decode_node
from pdserve.cluster.addresses import host_address
from pdserve.cluster.front import NodeFacts
from pdserve.cluster.incarnation import Incarnation
from pdserve.cluster.resolve import NodePlan
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.node import NodeAddress, NodeStanding, Role
from pdserve.rank.ranks import Ranks
from pdserve.rank.ring_ranks import start_ranks
from pdserve.rank.running_node import RunningNode
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import measure_steps, trial_limits
from pdserve.rpc.network import GrpcNetwork
from pdserve.telemetry.traces import tracer_for
from prefill_node.server import start_prefill_node

logger = logging.getLogger(__name__)

EitherNode = RunningNode | RunningDecodeNode


class NodeFront:
    """A ``NodeSide``, made by ``front_of``. ``set_nodes`` tells a decode node its prefill nodes."""

    def __init__(
        self, incarnation: Incarnation, ranks: Ranks, meter: StepMeter, node: EitherNode
    ) -> None:
        self.failed: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        self._incarnation = incarnation
        self._ranks = ranks
        self._meter = meter
        self._node = node
        self._is_switching = False
        self._prefill_nodes: tuple[NodeAddress, ...] = ()
        node.failed.add_done_callback(self._on_failed)

    @property
    def facts(self) -> NodeFacts:
        return NodeFacts(address=self._node.address, max_model_len=self._node.node.max_model_len)

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        addresses = (node.address for node in nodes if node.role is Role.PREFILL)
        self._prefill_nodes = tuple(filter(None, addresses))
        if not self._is_switching:
            self._connect()

    async def until_idle(self) -> None:
        await self._node.node.readiness.until_idle()

    async def switch(self, incarnation_id: str, plan: NodePlan) -> None:
        """Be another incarnation, of the plan's role, with the same ranks.

        What is held may finish. Raises PdserveError; then there is nothing left but to close.
        """
        self._is_switching = True
        self._incarnation = replace(self._incarnation, id=incarnation_id, plan=plan)
        await self._node.hand_over(incarnation_id, f"it becomes a {plan.role} node")
        self._node = await _start_node(self._incarnation, self._ranks, self._meter)
        self._node.failed.add_done_callback(self._on_failed)
        self._is_switching = False
        self._connect()

    async def close(self, grace_s: float) -> None:
        await self._node.close(grace_s)

    def _connect(self) -> None:
        if isinstance(self._node, RunningDecodeNode):
            self._node.set_prefill_nodes(self._prefill_nodes)

    def _on_failed(self, failed: "asyncio.Future[PdserveError]") -> None:
        if not self.failed.done():
            self.failed.set_result(failed.result())


async def start_front(incarnation: Incarnation) -> NodeFront:
    """Meet the ranks, which start meanwhile, and serve. Raises PdserveError."""
    config = incarnation.site.cluster.config
    ranks = await start_ranks(
        run_dir=incarnation.make_run_dir(),
        tp_size=incarnation.plan.pool.tensor_parallel_size,
        start_timeout_s=incarnation.start_timeout_s,
        step_timeout_s=incarnation.step_timeout_s,
        silence_s=config.network.silence_s,
        # The larger pool's: the ranks may change their role.
        max_step_tokens=max(
            config.prefill.max_num_batched_tokens, config.decode.max_num_batched_tokens
        ),
    )
    return await front_of(incarnation, ranks, StepMeter())


async def front_of(incarnation: Incarnation, ranks: Ranks, meter: StepMeter) -> NodeFront:
    """Serve with ranks that are ready; they are closed where that fails. Raises PdserveError."""
    try:
        node = await _start_node(incarnation, ranks, meter)
    except BaseException:
        await ranks.close()
        raise
    return NodeFront(incarnation, ranks, meter, node)


async def _start_node(incarnation: Incarnation, ranks: Ranks, meter: StepMeter) -> EitherNode:
    plan, cluster = incarnation.plan, incarnation.site.cluster
    network = cluster.config.network
    spec = cluster.node_spec(plan, incarnation.id, host_address(network))
    spec = replace(spec, model_dir=incarnation.site.model_dir)
    await measure_steps(ranks, trial_limits(spec), meter, MonotonicClock())
    tracer = tracer_for(spec.observability, spec.name)
    start = start_prefill_node if plan.role is Role.PREFILL else start_decode_node
    node = await start(
        spec,
        ranks,
        silence_s=network.silence_s,
        meter=meter,
        network=GrpcNetwork(incarnation.site.access),
        tracer=tracer,
    )
    await node.tell(spec, tracer)
    logger.info("%s serves at %s", spec.incarnation, node.address.address)
    return node
