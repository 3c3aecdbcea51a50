"""The gRPC face of a decode node: sessions of routers, and channels to prefill nodes."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import grpc

from decode_node.channel import PrefillChannel
from decode_node.grammars import load_compiler, start_grammars
from decode_node.node import DecodeNode
from decode_node.requests import RouterSession
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import HandshakeError, NodeLostError, PdserveError
from pdserve.core.node import NodeAddress, NodeSpec
from pdserve.core.request import RequestKey
from pdserve.rank.handshake import check_hello, make_record
from pdserve.rank.ranks import Ranks
from pdserve.rank.running_node import STATUS_PERIOD_S, RunningNode, make_welcome, start_server
from pdserve.rank.step_meter import StepMeter
from pdserve.rpc.network import GrpcNetwork, Network
from pdserve.rpc.session import DEFAULT_SILENCE_S, MAX_OUTPUT_BYTES, Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from pdserve.telemetry.traces import Tracer

logger = logging.getLogger(__name__)


class RunningDecodeNode:
    """A decode node that runs, and the prefill nodes that it keeps connected to."""

    def __init__(
        self,
        running: RunningNode,
        node: DecodeNode,
        record: session_pb2.CompatibilityRecord,
        silence_s: float,
        network: Network,
    ) -> None:
        self.node = node
        self._running = running
        self._record = record
        self._silence_s = silence_s
        self._network = network
        self._channels: dict[NodeAddress, asyncio.Task[None]] = {}

    @property
    def address(self) -> NodeAddress:
        return self._running.address

    @property
    def failed(self) -> asyncio.Future[PdserveError]:
        return self._running.failed

    def set_prefill_nodes(self, addresses: tuple[NodeAddress, ...]) -> None:
        """Keep connected to these and no others. A node made anew is another address."""
        for address in set(self._channels) - set(addresses):
            self._channels.pop(address).cancel()
        for address in addresses:
            if address not in self._channels:
                channel = PrefillChannel(
                    self.node, self._record, address, self._silence_s, self._network
                )
                task = self._running.run(channel.run(), f"channel to {address.name}")
                self._channels[address] = task

    async def tell(self, spec: NodeSpec, tracer: Tracer | None) -> None:
        """See ``RunningNode.tell``."""
        await self._running.tell(spec, tracer)

    async def close(self, grace_s: float) -> None:
        await self._running.close(grace_s)
        self.node.close_grammars()

    async def hand_over(self, incarnation: str, reason: str) -> None:
        """See ``RunningNode.hand_over``."""
        await self._running.hand_over(incarnation, reason)
        self.node.close_grammars()


async def start_decode_node(
    spec: NodeSpec,
    ranks: Ranks,
    clock: Clock | None = None,
    *,
    silence_s: float = DEFAULT_SILENCE_S,
    meter: StepMeter | None = None,
    network: Network | None = None,
    tracer: Tracer | None = None,
) -> RunningDecodeNode:
    """Start serving with ranks that are ready. Raises ConfigError if no port is free.

    Who says nothing for ``silence_s``, a router or a prefill node, is taken for dead. ``meter``
    knows what was measured before.
    """
    grammars = None
    if spec.model_dir is not None:
        grammars = await start_grammars(partial(load_compiler, spec.model_dir, spec.model))
    node = DecodeNode(spec, ranks, clock or MonotonicClock(), meter, tracer, grammars)
    servicer = _Servicer(node, ranks, silence_s)

    def register(server: grpc.aio.Server) -> None:
        session_pb2_grpc.add_DecodeNodeServicer_to_server(servicer, server)

    network = network or GrpcNetwork()
    server, address = await start_server(spec, network, register)
    running = RunningNode(address, server, node, ranks, end_streams=servicer.end_streams)
    running.run(servicer.run_status(), "status")
    if grammars is not None:
        running.run(node.run_grammars(), "grammars")
    return RunningDecodeNode(running, node, make_record(spec, ranks), silence_s, network)


class _Servicer(session_pb2_grpc.DecodeNodeServicer):
    def __init__(self, node: DecodeNode, ranks: Ranks, silence_s: float) -> None:
        self._node = node
        self._silence_s = silence_s
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
        heard = listen(request_iterator, peer=context.peer(), silence_s=self._silence_s)
        async with aclosing(heard) as messages:
            try:
                check_hello(self._node.spec, (await anext(messages)).hello)
            except (HandshakeError, NodeLostError, StopAsyncIteration) as error:
                reason = str(error) or "no hello came"
                logger.warning("router at %s refused: %s", context.peer(), reason)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            try:
                async with aclosing(self._run_session(messages)) as sending:
                    async for message in sending:
                        yield message
            except NodeLostError as error:
                logger.warning("router at %s left: %s", context.peer(), error)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def _run_session(
        self, messages: AsyncIterator[session_pb2.RouterMessage]
    ) -> AsyncGenerator[session_pb2.DecodeMessage, None]:
        """What a router that fits is told, until it ends the session or is lost.

        Raises NodeLostError where it did not read what it was told.
        """
        outbox: Outbox[session_pb2.DecodeMessage] = Outbox(max_bytes=MAX_OUTPUT_BYTES)
        session = RouterSession(outbox)
        welcome = make_welcome(self._node.spec, self._node.max_model_len, self._rank_infos)
        outbox.put(session_pb2.DecodeMessage(welcome=welcome))
        outbox.put(self._status())
        self._node.open_session(session)
        self._sessions.add(session)
        reader = asyncio.get_running_loop().create_task(self._read(session, messages))
        try:
            async with aclosing(aiter(outbox)) as sending:
                async for message in sending:
                    yield message
            outbox.check("router")
            if reader.done():
                await reader  # a fault of ours ends the stream with an error
        finally:
            self._sessions.discard(session)
            self._node.close_session(session)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def end_streams(self) -> None:
        """Say no more to any router than was said."""
        for session in self._sessions:
            session.outbox.close()

    async def run_status(self) -> None:
        """Tell every router how things stand, every second and when they change."""
        async for _ in self._node.readiness.changes(STATUS_PERIOD_S):
            message = self._status()
            for session in self._sessions:
                session.outbox.put(message)

    def _status(self) -> session_pb2.DecodeMessage:
        return session_pb2.DecodeMessage(status=self._node.status(self._rank_infos))

    async def _read(
        self, session: RouterSession, messages: AsyncIterator[session_pb2.RouterMessage]
    ) -> None:
        """Hand messages to the node until the router ends the session or is lost."""
        reason = "it ended the session"
        try:
            async for message in messages:
                session.outbox.check("router")
                self._on_message(session, message)
        except NodeLostError as error:
            reason = str(error)
        finally:
            logger.info("router disconnected: %s", reason)
            session.outbox.close()
            self._node.close_session(session)  # now: what waits for it may never be read

    def _on_message(self, session: RouterSession, message: session_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._node.submit(session, message.submit)
            case "abort":
                key = RequestKey(message.abort.request_id, message.abort.attempt)
                self._node.abort(session, key)
            case "end_choice":
                ended = message.end_choice
                key = RequestKey(ended.request_id, ended.attempt)
                self._node.end_choice(session, key, ended.choice)
            case _:
                pass  # a heartbeat; hello comes once
