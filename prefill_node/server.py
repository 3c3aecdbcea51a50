"""The gRPC face of a prefill node: sessions of decode nodes, and routers that watch its load."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc

from kv_transfer.commands import Peer
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import HandshakeError, NodeLostError
from pdserve.core.node import NodeSpec
from pdserve.rank.handshake import check_hello, check_record, make_record
from pdserve.rank.ranks import Ranks
from pdserve.rank.running_node import STATUS_PERIOD_S, RunningNode, make_welcome, start_server
from pdserve.rank.step_meter import StepMeter
from pdserve.rpc import convert
from pdserve.rpc.network import GrpcNetwork, Network
from pdserve.rpc.session import DEFAULT_SILENCE_S, MAX_OUTPUT_BYTES, Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from pdserve.telemetry.traces import Tracer
from prefill_node.node import PrefillNode
from prefill_node.sessions import DecodeSession

logger = logging.getLogger(__name__)


async def start_prefill_node(
    spec: NodeSpec,
    ranks: Ranks,
    clock: Clock | None = None,
    *,
    silence_s: float = DEFAULT_SILENCE_S,
    meter: StepMeter | None = None,
    network: Network | None = None,
    tracer: Tracer | None = None,
) -> RunningNode:
    """Start serving with ranks that are ready. Raises ConfigError if no port is free.

    A decode node that says nothing for ``silence_s`` is taken for dead. ``meter`` knows what
    was measured before.
    """
    node = PrefillNode(spec, ranks, clock or MonotonicClock(), meter, tracer)
    servicer = _Servicer(node, ranks, silence_s)

    def register(server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_PrefillNodeServicer_to_server(servicer, server)

    server, address = await start_server(spec, network or GrpcNetwork(), register)
    running = RunningNode(address, server, node, ranks, end_streams=servicer.end_streams)
    running.run(servicer.run_status(), "status")
    return running


class _Servicer(session_pb2_grpc.PrefillNodeServicer):
    def __init__(self, node: PrefillNode, ranks: Ranks, silence_s: float) -> None:
        self._node = node
        self._silence_s = silence_s
        self._rank_infos = [
            session_pb2.RankInfo(rank=rank, pid=pid, host=node.spec.host)
            for rank, pid in enumerate(ranks.pids)
        ]
        self._record = make_record(node.spec, ranks)
        self._watchers: set[Outbox[session_pb2.WatchMessage]] = set()
        self._sessions: set[DecodeSession] = set()

    async def Session(
        self,
        request_iterator: AsyncIterator[session_pb2.PrefillRequest],
        context: grpc.aio.ServicerContext[session_pb2.PrefillRequest, session_pb2.PrefillMessage],
    ) -> AsyncIterator[session_pb2.PrefillMessage]:
        heard = listen(request_iterator, peer=context.peer(), silence_s=self._silence_s)
        async with aclosing(heard) as messages:
            try:
                peer = check_record(self._record, (await anext(messages)).hello)
            except (HandshakeError, NodeLostError, StopAsyncIteration) as error:
                reason = str(error) or "no hello came"
                logger.warning("decode node at %s refused: %s", context.peer(), reason)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            try:
                async with aclosing(self._run_session(peer, messages)) as sending:
                    async for message in sending:
                        yield message
            except NodeLostError as error:
                logger.warning("decode node at %s left: %s", context.peer(), error)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def Watch(
        self,
        request: session_pb2.RouterHello,
        context: grpc.aio.ServicerContext[session_pb2.RouterHello, session_pb2.WatchMessage],
    ) -> AsyncIterator[session_pb2.WatchMessage]:
        try:
            check_hello(self._node.spec, request)
        except HandshakeError as error:
            logger.warning("router at %s refused: %s", context.peer(), error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        outbox: Outbox[session_pb2.WatchMessage] = Outbox(max_bytes=MAX_OUTPUT_BYTES)
        welcome = make_welcome(self._node.spec, self._node.max_model_len, self._rank_infos)
        outbox.put(session_pb2.WatchMessage(welcome=welcome))
        outbox.put(session_pb2.WatchMessage(status=self._node.status(self._rank_infos)))
        self._watchers.add(outbox)
        try:
            async with aclosing(aiter(outbox)) as sending:
                async for message in sending:
                    yield message
        finally:
            self._watchers.discard(outbox)

    def end_streams(self) -> None:
        """Say no more to anybody than was said."""
        for watcher in self._watchers:
            watcher.close()
        for session in self._sessions:
            session.outbox.close()

    async def run_status(self) -> None:
        """Tell everybody how things stand, every second and when they change."""
        async for _ in self._node.readiness.changes(STATUS_PERIOD_S):
            status = self._node.status(self._rank_infos)
            for watcher in self._watchers:
                watcher.put(session_pb2.WatchMessage(status=status))
            for session in self._sessions:
                session.outbox.put(session_pb2.PrefillMessage(status=status))

    async def _run_session(
        self, peer: Peer, messages: AsyncIterator[session_pb2.PrefillRequest]
    ) -> AsyncGenerator[session_pb2.PrefillMessage, None]:
        """What a decode node that fits is told, until it ends the session or is lost.

        Raises NodeLostError where it did not read what it was told.
        """
        outbox: Outbox[session_pb2.PrefillMessage] = Outbox(max_bytes=MAX_OUTPUT_BYTES)
        outbox.put(session_pb2.PrefillMessage(welcome=self._record))
        session = self._node.connect(peer, outbox)
        self._sessions.add(session)
        reader = asyncio.get_running_loop().create_task(self._read(session, messages))
        try:
            async with aclosing(aiter(outbox)) as sending:
                async for message in sending:
                    yield message
            outbox.check("decode node")
            if reader.done():
                await reader  # a fault of ours ends the stream with an error
        finally:
            self._sessions.discard(session)
            self._node.disconnect(session, "the stream ended")
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(
        self, session: DecodeSession, messages: AsyncIterator[session_pb2.PrefillRequest]
    ) -> None:
        """Hand messages to the node until the decode node ends the session or is lost."""
        reason = "it ended the session"
        try:
            async for message in messages:
                session.outbox.check("decode node")
                self._on_message(session, message)
        except NodeLostError as error:
            reason = str(error)
        finally:
            self._node.disconnect(session, reason)

    def _on_message(self, session: DecodeSession, message: session_pb2.PrefillRequest) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._node.prefill(session, message.prefill)
            case "abort":
                self._node.abort(session, convert.handoff_from_proto(message.abort))
            case "links_welcome":
                self._node.make_links(session)
            case _:
                pass  # a heartbeat; hello comes once
