"""The gRPC face of a decode node: sessions of routers, and channels to prefill nodes."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from decode_node.channel import PrefillChannel
from decode_node.node import DecodeNode
from decode_node.requests import RouterSession
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import HandshakeError, NodeLostError, PdserveError
from pdserve.core.node import NodeAddress, NodeSpec
from pdserve.core.request import RequestKey
from pdserve.rank.handshake import make_record
from pdserve.rank.ranks import Ranks
from pdserve.rank.running_node import (
    STATUS_PERIOD_S,
    RunningNode,
    make_welcome,
    start_server,
    ticks,
)
from pdserve.rpc import convert
from pdserve.rpc.session import PROTOCOL_VERSION, Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc


class RunningDecodeNode:
    """A decode node that runs, and the prefill nodes that it keeps connected to."""

    def __init__(
        self, running: RunningNode, node: DecodeNode, record: session_pb2.CompatibilityRecord
    ) -> None:
        self._running = running
        self._node = node
        self._record = record
        self._channels: dict[NodeAddress, asyncio.Task[None]] = {}

    @property
    def address(self) -> NodeAddress:
        return self._running.address

    @property
    def failed(self) -> asyncio.Future[PdserveError]:
        return self._running.failed

    def set_prefill_nodes(self, addresses: tuple[NodeAddress, ...]) -> None:
        """Keep connected to these and no others. A node made anew has another address."""
        for address in set(self._channels) - set(addresses):
            self._channels.pop(address).cancel()
        for address in addresses:
            if address not in self._channels:
                channel = PrefillChannel(self._node, self._record, address)
                task = self._running.run(channel.run(), f"channel to {address.name}")
                self._channels[address] = task

    async def close(self, grace_s: float) -> None:
        await self._running.close(grace_s)


async def start_decode_node(
    spec: NodeSpec, ranks: Ranks, clock: Clock | None = None
) -> RunningDecodeNode:
    """Start serving with ranks that are ready. Raises ConfigError if no port is free."""
    node = DecodeNode(spec, ranks, clock or MonotonicClock())
    servicer = _Servicer(node, ranks)

    def register(server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)

    server, address = await start_server(spec, register)
    running = RunningNode(address, server, ranks)
    running.run(node.run(), "loop")
    running.run(node.run_kv_events(), "KV events")
    running.run(servicer.run_status(), "status")
    return RunningDecodeNode(running, node, make_record(spec, ranks))


class _Servicer(session_pb2_grpc.DecodeNodeServicer):
    def __init__(self, node: DecodeNode, ranks: Ranks) -> None:
        self._node = node
        self._rank_infos = [
            session_pb2.RankInfo(rank=rank, pid=pid, host=node.spec.host)
            for rank, pid in enumerate(ranks.pids)
        ]
        self._sessions: set[RouterSession] = set()

    async def Session(
        self,
        request_iterator: AsyncIterator[session_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[session_pb2.RouterMessage, session_pb2.DecodeMessage],
    ) -> AsyncIterator[session_pb2.DecodeMessage]:
        messages = aiter(listen(request_iterator, peer=context.peer()))
        try:
            self._check_hello((await anext(messages)).hello)
        except (HandshakeError, NodeLostError, StopAsyncIteration) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error) or "no hello came")
        outbox: Outbox[session_pb2.DecodeMessage] = Outbox()
        session = RouterSession(outbox)
        welcome = make_welcome(self._node.spec, self._node.max_model_len, self._rank_infos)
        outbox.put(session_pb2.DecodeMessage(welcome=welcome))
        outbox.put(session_pb2.DecodeMessage(status=self._node.status(self._rank_infos)))
        self._node.open_session(session)
        self._sessions.add(session)
        reader = asyncio.get_running_loop().create_task(self._read(session, messages))
        try:
            async for message in outbox:
                yield message
        finally:
            reader.cancel()
            self._sessions.discard(session)
            self._node.close_session(session)

    async def run_status(self) -> None:
        """Tell every router how things stand, every second."""
        async for _ in ticks(STATUS_PERIOD_S):
            message = session_pb2.DecodeMessage(status=self._node.status(self._rank_infos))
            for session in self._sessions:
                session.outbox.put(message)

    def _check_hello(self, hello: session_pb2.RouterHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise HandshakeError(
                "protocol_version",
                ours=PROTOCOL_VERSION,
                theirs=hello.protocol_version,
                cure="run the same release of pdserve on router and nodes",
            )
        fingerprint = self._node.spec.model.fingerprint
        if hello.model_fingerprint != fingerprint:
            raise HandshakeError(
                "model_fingerprint",
                ours=fingerprint,
                theirs=hello.model_fingerprint,
                cure="serve the same model files from router and nodes",
            )

    async def _read(
        self, session: RouterSession, messages: AsyncIterator[session_pb2.RouterMessage]
    ) -> None:
        try:
            async for message in messages:
                self._on_message(session, message)
        except NodeLostError:
            pass  # silent or broken: ending the outbox ends the session
        session.outbox.close()

    def _on_message(self, session: RouterSession, message: session_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._node.submit(session, convert.request_from_proto(message.submit))
            case "abort":
                key = RequestKey(message.abort.request_id, message.abort.attempt)
                self._node.abort(session, key)
            case _:
                pass  # a heartbeat; hello comes once
