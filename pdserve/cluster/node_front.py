"""The front of a node in its process: ranks met, node started, one of two kinds."""

import asyncio
import logging
from dataclasses import replace

from decode_node.server import RunningDecodeNode, start_decode_node
from pdserve.cluster.addresses import host_address
from pdserve.cluster.incarnation import Incarnation
from pdserve.core.clock import MonotonicClock
from pdserve.core.errors import PdserveError
from pdserve.core.node import NodeAddress, NodeStanding, Role
from pdserve.rank.ring_ranks import start_ranks
from pdserve.rank.running_node import RunningNode
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import measure_steps, trial_limits
from pdserve.rpc.network import GrpcNetwork
from pdserve.telemetry.traces import tracer_for
from prefill_node.server import start_prefill_node

logger = logging.getLogger(__name__)


class NodeFront:
    """A ``NodeSide``. ``set_nodes`` tells a decode node its prefill nodes."""

    def __init__(self, node: RunningNode | RunningDecodeNode) -> None:
        self._node = node

    @property
    def address(self) -> NodeAddress:
        return self._node.address

    @property
    def failed(self) -> "asyncio.Future[PdserveError]":
        return self._node.failed

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        if isinstance(self._node, RunningDecodeNode):
            prefill = [node.address for node in nodes if node.role is Role.PREFILL]
            self._node.set_prefill_nodes(tuple(filter(None, prefill)))

    async def until_idle(self) -> None:
        await self._node.node.readiness.until_idle()

    async def close(self, grace_s: float) -> None:
        await self._node.close(grace_s)


async def start_front(incarnation: Incarnation) -> NodeFront:
    """Meet the ranks, which start meanwhile, and serve. Raises PdserveError."""
    plan, cluster = incarnation.plan, incarnation.site.cluster
    spec = cluster.node_spec(plan, incarnation.id, host_address(cluster.config.network))
    spec = replace(spec, model_dir=incarnation.site.model_dir)
    silence_s = cluster.config.network.silence_s
    ranks = await start_ranks(
        run_dir=incarnation.make_run_dir(),
        tp_size=plan.pool.tensor_parallel_size,
        start_timeout_s=incarnation.start_timeout_s,
        step_timeout_s=incarnation.step_timeout_s,
        silence_s=silence_s,
    )
    start = start_prefill_node if plan.role is Role.PREFILL else start_decode_node
    try:
        tracer = tracer_for(spec.observability, spec.name)
        meter = StepMeter()
        await measure_steps(ranks, trial_limits(spec), meter, MonotonicClock())
        node = await start(
            spec,
            ranks,
            silence_s=silence_s,
            meter=meter,
            network=GrpcNetwork(incarnation.site.access),
            tracer=tracer,
        )
        await node.tell(spec, tracer)
    except BaseException:
        await ranks.close()
        raise
    logger.info("%s serves at %s", spec.incarnation, node.address.address)
    return NodeFront(node)
