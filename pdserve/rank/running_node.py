"""A node that runs: its gRPC server, its tasks and its ranks, started and closed as one.

Owns the lifetime; what the tasks do is the node's business. Ranks outlive their node where it hands
them over to the next one.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Protocol

import grpc

from pdserve.core.errors import ConfigError, InternalError, PdserveError
from pdserve.core.node import NodeAddress, NodeSpec
from pdserve.engine.batch import Batch
from pdserve.rank.hand_over import hand_over
from pdserve.rank.node_metrics import serve_node_metrics
from pdserve.rank.ranks import Ranks
from pdserve.rank.readiness import Readiness
from pdserve.rpc.network import Network
from pdserve.rpc.session import PROTOCOL_VERSION
from pdserve.rpc.v1 import session_pb2
from pdserve.telemetry.traces import Tracer, close_tracer

logger = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
PARTING_S = 1.0  # for streams to end after what was said last


class Node(Protocol):
    """What both kinds of node are to their lifetime."""

    @property
    def readiness(self) -> Readiness: ...

    @property
    def max_model_len(self) -> int: ...

    def fail(self, error: PdserveError) -> None: ...

    def metrics(self) -> str: ...

    def leave(self, reason: str) -> Batch | None:
        """Let go of everybody, when nothing runs; the step that frees the last slots, if any."""

    async def run(self) -> None: ...

    async def run_kv_events(self) -> None: ...


class RunningNode:
    """``failed`` is done, with the error as its result, when the node can not go on.
    ``end_streams`` ends all that others read, after what is said so far.
    """

    def __init__(
        self,
        address: NodeAddress,
        server: grpc.aio.Server,
        node: Node,
        ranks: Ranks,
        *,
        end_streams: Callable[[], None],
    ) -> None:
        self.address = address
        self.node = node
        self.failed: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()
        self._server = server
        self._ranks = ranks
        self._end_streams = end_streams
        self._tasks: set[asyncio.Task[None]] = set()
        self.run(node.run(), "loop")
        self.run(node.run_kv_events(), "KV events")

    def run(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run a part of the node until ``close``; its failure is the node's."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.address.name} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def tell(self, spec: NodeSpec, tracer: Tracer | None) -> None:
        """Answer scrapes, and send what is traced, as long as the node lives. Raises ConfigError
        where no port is free.
        """
        if tracer is not None:
            self.run(_send_traces(tracer), "traces")
        if (server := await serve_node_metrics(spec, self.node.metrics)) is not None:
            self.address = replace(self.address, metrics_address=f"{spec.host}:{server.port}")
            self.run(server.run(), "metrics")

    async def close(self, grace_s: float) -> None:
        """Take no new work, give open sessions ``grace_s`` seconds, then end tasks and ranks."""
        self.node.readiness.lose("the node is closing")
        await self._stop(grace_s)
        await self._ranks.close()

    async def hand_over(self, incarnation: str, reason: str) -> None:
        """Finish what is here, take nothing new, and end but for the ranks, which are
        ``incarnation``'s then and hold nothing.

        Raises RankError when they are lost; then nothing is left to go on with.
        """
        self.node.readiness.lose(reason)
        await self.node.readiness.until_idle()
        self._end_streams()
        await self._stop(PARTING_S)
        await hand_over(self._ranks, self.node.leave(reason), incarnation)

    async def _stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, PdserveError):
            logger.error("%s: failed", task.get_name(), exc_info=error)
            error = InternalError(f"{task.get_name()}: {error!r}")
        if not self.failed.done():
            logger.error("node %s failed: %s", self.address.name, error)
            self.node.fail(error)
            self.failed.set_result(error)


async def _send_traces(tracer: Tracer) -> None:
    """The tracer sends by itself; at the end of this, what is left."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await close_tracer(tracer)


async def start_server(
    spec: NodeSpec, network: Network, register: Callable[[grpc.aio.Server], None]
) -> tuple[grpc.aio.Server, NodeAddress]:
    """Start a gRPC server on a free port of the configured range. Raises ConfigError if none is."""
    server = network.server()
    register(server)
    low, high = spec.port_range or (0, 0)
    for port in range(low, high + 1):
        try:
            bound = network.bind(server, f"{spec.host}:{port}")
        except RuntimeError:
            continue
        await server.start()
        address = NodeAddress(
            name=spec.name,
            role=spec.role,
            incarnation=spec.incarnation,
            address=f"{spec.host}:{bound}",
        )
        return server, address
    await server.stop(None)
    raise ConfigError(f"network: no free port for {spec.name} on {spec.host} in {low}..{high}")


def make_welcome(
    spec: NodeSpec, max_model_len: int, ranks: list[session_pb2.RankInfo]
) -> session_pb2.NodeWelcome:
    """What a node says first to a router."""
    return session_pb2.NodeWelcome(
        node=spec.name,
        role=spec.role,
        incarnation=spec.incarnation,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=spec.model.fingerprint,
        max_model_len=max_model_len,
        ranks=ranks,
        transport=spec.transport,
    )
