"""The gRPC face of a prefill node: sessions of decode nodes, and routers that watch its load."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import HandshakeError, NodeLostError
from pdserve.core.node import NodeSpec
from pdserve.rank.handshake import check_record, make_record, peer_of
from pdserve.rank.ranks import Ranks
from pdserve.rank.running_node import (
    STATUS_PERIOD_S,
    RunningNode,
    make_welcome,
    start_server,
    ticks,
)
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from prefill_node.node import DecodeSession, PrefillNode


async def start_prefill_node(
    spec: NodeSpec, ranks: Ranks, clock: Clock | None = None
) -> RunningNode:
    """Start serving with ranks that are ready. Raises ConfigError if no port is free."""
    node = PrefillNode(spec, ranks, clock or MonotonicClock())
    servicer = _Servicer(node, ranks)

    def register(server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_PrefillNodeServicer_to_server(servicer, server)

    server, address = await start_server(spec, register)
    running = RunningNode(address, server, ranks)
    running.run(node.run(), "loop")
    running.run(node.run_kv_events(), "KV events")
    running.run(servicer.run_status(), "status")
    return running


class _Servicer(session_pb2_grpc.PrefillNodeServicer):
    def __init__(self, node: PrefillNode, ranks: Ranks) -> None:
        self._node = node
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
        messages = aiter(listen(request_iterator, peer=context.peer()))
        try:
            hello = (await anext(messages)).hello
            check_record(self._record, hello)
        except (HandshakeError, NodeLostError, StopAsyncIteration) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error) or "no hello came")
        outbox: Outbox[session_pb2.PrefillMessage] = Outbox()
        outbox.put(session_pb2.PrefillMessage(welcome=self._record))
        session = self._node.connect(peer_of(hello), outbox)
        self._sessions.add(session)
        reader = asyncio.get_running_loop().create_task(self._read(session, messages))
        try:
            async for message in outbox:
                yield message
        finally:
            reader.cancel()
            self._sessions.discard(session)
            self._node.disconnect(session, "the session ended")

    async def Watch(
        self,
        request: session_pb2.RouterHello,
        context: grpc.aio.ServicerContext[session_pb2.RouterHello, session_pb2.WatchMessage],
    ) -> AsyncIterator[session_pb2.WatchMessage]:
        outbox: Outbox[session_pb2.WatchMessage] = Outbox()
        max_tokens = self._node.scheduler.ledger.max_tokens
        welcome = make_welcome(self._node.spec, max_tokens, self._rank_infos)
        outbox.put(session_pb2.WatchMessage(welcome=welcome))
        outbox.put(session_pb2.WatchMessage(status=self._node.status(self._rank_infos)))
        self._watchers.add(outbox)
        try:
            async for message in outbox:
                yield message
        finally:
            self._watchers.discard(outbox)

    async def run_status(self) -> None:
        """Tell everybody how things stand, every second."""
        async for _ in ticks(STATUS_PERIOD_S):
            status = self._node.status(self._rank_infos)
            for watcher in self._watchers:
                watcher.put(session_pb2.WatchMessage(status=status))
            for session in self._sessions:
                session.outbox.put(session_pb2.PrefillMessage(status=status))

    async def _read(
        self, session: DecodeSession, messages: AsyncIterator[session_pb2.PrefillRequest]
    ) -> None:
        reason = "the decode node ended the session"
        try:
            async for message in messages:
                self._on_message(session, message)
        except NodeLostError as error:
            reason = str(error)
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
