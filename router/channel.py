"""The router's gRPC sessions with the nodes: connected, watched, and made anew when they break.

``Channels`` holds one task per node. What nodes say goes into ``news``, in order; who owns which
request is the dispatcher's business. A session has a number of its own, so that the end of one is
never taken for the end of its successor.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace

import grpc

from pdserve.core.breaker import FAILURES_TO_OPEN, Breaker, Duty
from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import NodeLostError
from pdserve.core.failures import duty_blamed
from pdserve.core.node import NodeAddress, Role
from pdserve.core.request import Request, RequestKey
from pdserve.rpc.convert import request_to_proto
from pdserve.rpc.network import GrpcNetwork, Network
from pdserve.rpc.session import (
    DEFAULT_SILENCE_S,
    PROTOCOL_VERSION,
    Outbox,
    listen,
)
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from router.node_messages import rank_places, state_of, step_news
from router.nodes import DRAINING, LostNews, News, NodeView, StateNews, StepNews

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
REFUSED_BACKOFF_S = 10.0  # a node that does not fit is asked again, in case it is replaced

logger = logging.getLogger(__name__)

_NodeMessage = session_pb2.DecodeMessage | session_pb2.WatchMessage


class Channels:
    """All nodes of the cluster. Every method is called from the event loop's thread."""

    def __init__(
        self,
        *,
        router_id: str,
        model_fingerprint: str,
        silence_s: float = DEFAULT_SILENCE_S,
        clock: Clock | None = None,
        network: Network | None = None,
    ) -> None:
        self.news: asyncio.Queue[News] = asyncio.Queue()
        self._left_paired: set[Role] = set()  # roles of nodes that were paired and left
        self._hello = session_pb2.RouterHello(
            router_id=router_id,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=model_fingerprint,
        )
        self._silence_s = silence_s
        self._clock = clock or MonotonicClock()
        self._network = network or GrpcNetwork()
        self._draining: frozenset[str] = frozenset()
        self._session_numbers = itertools.count(1)
        self._channels: dict[str, _NodeChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def set_nodes(self, addresses: Iterable[NodeAddress]) -> None:
        """Connect to new nodes, leave those not named any more, reconnect those that moved."""
        wanted = {address.name: address for address in addresses}
        for name, channel in list(self._channels.items()):
            if wanted.get(name) != channel.view.address:
                del self._channels[name]
                if channel.view.was_paired:
                    self._left_paired.add(channel.view.role)
                closing = asyncio.create_task(channel.close("it left the cluster"))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        for name, address in wanted.items():
            if name not in self._channels:
                self._channels[name] = _NodeChannel(
                    address,
                    self._hello,
                    self.news,
                    self._session_numbers,
                    self._silence_s,
                    self._clock,
                    self._network,
                )

    def set_draining(self, names: Iterable[str]) -> None:
        """Nothing new goes to these from now on; what they hold, they finish."""
        self._draining = frozenset(names)
        for name in self._channels:
            self.news.put_nowait(StateNews(node=name))

    def views(self) -> tuple[NodeView, ...]:
        """All nodes, with what bars them from new work."""
        now_s = self._clock.now_s()
        return tuple([self._view(channel, now_s) for channel in self._channels.values()])

    def _view(self, channel: "_NodeChannel", now_s: float) -> NodeView:
        view, barred, breaker = (
            channel.view,
            self._bar(channel, now_s),
            channel.breaker.state(now_s),
        )
        if (barred, breaker) == (view.barred, view.breaker):
            return view  # as nearly always
        return replace(view, barred=barred, breaker=breaker)

    def _bar(self, channel: "_NodeChannel", now_s: float) -> str | None:
        if channel.view.name in self._draining:
            return DRAINING
        if not channel.breaker.allows(now_s):
            return f"it failed {FAILURES_TO_OPEN} times in a row, at last: {channel.breaker.reason}"
        return None

    def view(self, node: str) -> NodeView:
        """The node's view; it must be one of those set."""
        return self._channels[node].view

    def had_pair(self) -> bool:
        """Whether there were, at some time, a prefill node and a decode node connected to one."""
        now = {view.role for view in self.views() if view.was_paired}
        return now | self._left_paired == set(Role)

    def submit(self, node: str, request: Request) -> int:
        """Send a request; returns the number of the session that carries it.

        Raises NodeLostError where the node is not connected.
        """
        channel = self._channels.get(node)
        if channel is None or channel.view.session is None:
            raise NodeLostError(f"{node}: not connected")
        channel.send(session_pb2.RouterMessage(submit=request_to_proto(request)))
        channel.breaker.sent(self._clock.now_s())
        return channel.view.session

    def abort(self, node: str, session: int, key: RequestKey) -> None:
        """Tell the node to end a request, if the session that carried it still lives."""
        channel = self._channels.get(node)
        if channel is not None and channel.view.session == session:
            message = session_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)
            channel.send(session_pb2.RouterMessage(abort=message))
            channel.breaker.released()

    def end_choice(self, node: str, session: int, key: RequestKey, choice: int) -> None:
        """Tell the node to end one choice of a request, likewise."""
        channel = self._channels.get(node)
        if channel is not None and channel.view.session == session:
            message = session_pb2.ChoiceKey(
                request_id=key.request_id, attempt=key.attempt, choice=choice
            )
            channel.send(session_pb2.RouterMessage(end_choice=message))

    async def close(self) -> None:
        """Leave all nodes; they free what this router owned there."""
        self.set_nodes(())
        await asyncio.gather(*self._closing)


class _NodeChannel:
    """One node: its task, its view, and the outbox of its live session."""

    def __init__(
        self,
        address: NodeAddress,
        hello: session_pb2.RouterHello,
        news: asyncio.Queue[News],
        session_numbers: Iterator[int],
        silence_s: float,
        clock: Clock,
        network: Network,
    ) -> None:
        self.breaker = Breaker()  # of this incarnation
        self.view = NodeView(
            address=address,
            session=None,
            max_model_len=None,
            ranks=(),
            state=None,
            was_paired=False,
            problem=None,
        )
        self._hello = hello
        self._news = news
        self._session_numbers = session_numbers
        self._silence_s = silence_s
        self._clock = clock
        self._network = network
        self._outbox = _new_outbox()
        self._task = asyncio.create_task(self._run(), name=f"session with {address.name}")

    def send(self, message: session_pb2.RouterMessage) -> None:
        self._outbox.put(message)

    async def close(self, reason: str) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lose(NodeLostError(f"{self.view.name}: {reason}"))

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with aclosing(self._messages()) as messages:
                    async for message in messages:
                        self._take(message)
                        backoff_s = FIRST_BACKOFF_S
                error = NodeLostError(f"{self.view.name}: it closed the session")
            except NodeLostError as lost:
                error = lost
            except Exception as fault:  # the outermost loop of this session
                logger.exception("fault while listening to %s", self.view.name)
                error = NodeLostError(f"{self.view.name}: it said what makes no sense: {fault}")
            backoff_s = REFUSED_BACKOFF_S if _is_refusal(error) else backoff_s
            if str(error) != self.view.problem:  # said once, however often it is tried
                logger.warning("no session with %s", error)
            self._lose(error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _messages(self) -> AsyncGenerator[_NodeMessage, None]:
        """One session from its beginning to its end."""
        address = self.view.address
        # A channel of its own each time: gRPC's waits between connection attempts grow to minutes.
        async with self._network.channel(address.address) as channel:
            peer = f"{address.name} at {address.address}"
            heard = listen(self._call(channel), peer=peer, silence_s=self._silence_s)
            async with aclosing(heard) as messages:
                async for message in messages:
                    self._outbox.check(address.name)
                    yield message

    def _call(self, channel: grpc.aio.Channel) -> AsyncIterator[_NodeMessage]:
        if self.view.role is Role.PREFILL:
            return aiter(session_pb2_grpc.PrefillNodeStub(channel).Watch(self._hello))
        self._outbox = _new_outbox()
        self._outbox.put(session_pb2.RouterMessage(hello=self._hello))
        return aiter(session_pb2_grpc.DecodeNodeStub(channel).Session(aiter(self._outbox)))

    def _take(self, message: _NodeMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self._welcome(message.welcome)
            case "status":
                self._tell_state(message.status)
            case "outputs":
                assert isinstance(message, session_pb2.DecodeMessage)
                news = step_news(self.view.name, message.outputs)
                self._judge(news)
                self._news.put_nowait(news)

    def _judge(self, news: StepNews) -> None:
        """What a step's news say of the node. However many requests it failed, it failed once."""
        now_s = self._clock.now_s()
        if any(output.finish_reason is not None for output in news.outputs):
            self.breaker.succeeded()
        elif news.outputs:
            self.breaker.progressed(now_s)
        blamed = [f for f in news.failures if duty_blamed(f.kind, own=Duty.DECODE) is Duty.DECODE]
        if blamed:
            self._fail(f"{blamed[0].kind}: {blamed[0].message}")
        elif news.failures:
            self.breaker.released()

    def _fail(self, reason: str) -> None:
        """One failure of the node; who waits for it is told when it may be tried again."""
        now_s = self._clock.now_s()
        self.breaker.failed(reason, now_s)
        if wait_s := self.breaker.wait_s(now_s):
            again = StateNews(node=self.view.name)
            asyncio.get_running_loop().call_later(wait_s, self._news.put_nowait, again)

    def _welcome(self, welcome: session_pb2.NodeWelcome) -> None:
        address = self.view.address
        expected = (address.name, address.role, address.incarnation)
        if (welcome.node, welcome.role, welcome.incarnation) != expected:
            raise NodeLostError(
                f"{address.name}: at {address.address} answers the {welcome.role} node "
                f"{welcome.node} of another start"
            )
        session = next(self._session_numbers)
        self.view = replace(
            self.view,
            session=session,
            max_model_len=welcome.max_model_len,
            ranks=rank_places(welcome.ranks),
            transport=welcome.transport or None,
            problem=None,
        )
        logger.info("%s: connected at %s", address.name, address.address)
        self._news.put_nowait(StateNews(node=address.name))

    def _tell_state(self, status: session_pb2.NodeStatus) -> None:
        was_ready = self.view.ready
        ranks = rank_places(status.ranks) or self.view.ranks
        is_linked = self.view.role is Role.PREFILL or bool(status.connected_prefill_nodes)
        self.view = replace(
            self.view,
            state=state_of(status),
            ranks=ranks,
            was_paired=self.view.was_paired or (status.ready and is_linked),
        )
        if was_ready != self.view.ready:
            word = "ready" if self.view.ready else f"not ready: {self.view.reason}"
            logger.info("%s: %s", self.view.name, word)
        self._news.put_nowait(StateNews(node=self.view.name))

    def _lose(self, error: NodeLostError) -> None:
        session = self.view.session
        self.view = replace(self.view, session=None, state=None, problem=str(error))
        self._outbox.close()
        if session is not None:
            if self.view.role is Role.DECODE:
                self._fail(str(error))
            self._news.put_nowait(LostNews(node=self.view.name, session=session, error=error))


def _new_outbox() -> Outbox[session_pb2.RouterMessage]:
    heartbeat = session_pb2.RouterMessage(heartbeat=session_pb2.Heartbeat())
    return Outbox(idle_message=heartbeat)


def _is_refusal(error: NodeLostError) -> bool:
    cause = error.__cause__
    return isinstance(cause, grpc.aio.AioRpcError) and cause.code() in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
    )
