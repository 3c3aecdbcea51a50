"""gRPC in memory: what ``pdserve.rpc.network.Network`` makes, over the pipes of a simulation.

Messages are serialised and parsed as over a real channel, so nothing is shared by two processes.
The ends of calls are those of ``grpc.aio``: a call that was cancelled ends the other side's task, a
reader that is cancelled cancels its call, a lost process is UNAVAILABLE.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc

from tests.simulation.loop import Process, current_process
from tests.simulation.pipes import Connection, Wires


@dataclass(frozen=True)
class _Open:
    method: str


@dataclass(frozen=True)
class _End:
    """A side's last word; of a client OK is the end of its requests."""

    code: grpc.StatusCode
    details: str = ""


CANCEL_LATER_S = (0.0, 0.0, 0.001)
_OVER = _End(grpc.StatusCode.OK)
_CANCELLED = _End(grpc.StatusCode.CANCELLED, "the other side has cancelled the call")
LOST = _End(grpc.StatusCode.UNAVAILABLE, "the connection is lost")


class MemoryNetwork:
    """The ``Network`` of every process of a simulation."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.faults: list[str] = []  # what a handler let out
        self._servers: dict[str, MemoryServer] = {}
        self._num_ports = 0

    def channel(self, address: str) -> grpc.aio.Channel:
        return MemoryChannel(self, address)

    def server(self) -> grpc.aio.Server:
        return MemoryServer(self)

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        return server.add_insecure_port(address)

    def process_lost(self, process: Process) -> None:
        """A process has died: the other ends learn it."""
        for connection in self.wires.between(process.name):
            self.wires.cut(connection, LOST)

    def cut(self, one: str, other: str) -> None:
        """The connections between two processes break."""
        for connection in self.wires.between(one, other):
            self.wires.cut(connection, LOST)

    # ---- for servers and channels -----------------------------------------------------------

    def new_port(self) -> int:
        self._num_ports += 1
        return self._num_ports

    def listen(self, address: str, server: "MemoryServer") -> None:
        self._servers[address] = server

    def server_at(self, address: str) -> "MemoryServer | None":
        """Who was started there last, whether or not it still lives."""
        return self._servers.get(address)


# ---- clients ------------------------------------------------------------------------------------


class MemoryCall:
    """The client's side of one call; iterate it for the answers."""

    def __init__(self, connection: Connection, requests: AsyncIterator[bytes], parse: Any) -> None:
        self._connection = connection
        self._parse = parse
        self._inbox: asyncio.Queue[object] = asyncio.Queue()
        self._end: _End | None = None
        self._is_cancelled = False
        connection.down.receive = self._inbox.put_nowait
        self._sending = asyncio.get_running_loop().create_task(self._send(requests))

    def cancel(self) -> bool:
        self._sending.cancel()
        if self._end is not None or self._is_cancelled:
            return False
        self._is_cancelled = True
        self._connection.up.cut(_CANCELLED)
        return True

    def __aiter__(self) -> "MemoryCall":
        return self

    async def __anext__(self) -> Any:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._end is None:
            try:
                item = await self._inbox.get()
            except asyncio.CancelledError:
                self.cancel()
                raise
            if isinstance(item, bytes):
                return self._parse(item)
            assert isinstance(item, _End)
            self._end = item
            self._sending.cancel()
        if self._end.code is grpc.StatusCode.OK:
            raise StopAsyncIteration
        raise grpc.aio.AioRpcError(self._end.code, details=self._end.details)

    async def _send(self, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self._connection.up.send(request)
        self._connection.up.send(_OVER)


class MemoryChannel(grpc.aio.Channel):
    """Each call is a connection of its own."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: list[MemoryCall] = []

    async def __aenter__(self) -> "MemoryChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(self, method, request_serializer=None, response_deserializer=None, **_):
        async def serialised(requests: AsyncIterator[Any]) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request_serializer(request)

        return lambda requests: self._call(method, serialised(requests), response_deserializer)

    def unary_stream(self, method, request_serializer=None, response_deserializer=None, **_):
        async def serialised(request: Any) -> AsyncIterator[bytes]:
            yield request_serializer(request)

        return lambda request: self._call(method, serialised(request), response_deserializer)

    def _call(self, method: str, requests: AsyncIterator[bytes], parse: Any) -> MemoryCall:
        client, server = current_process(), self._network.server_at(self._address)
        assert client is not None, "only processes speak to each other"
        assert server is not None, f"nobody was ever at {self._address}"
        connection = self._network.wires.connect(client, server.process)
        call = MemoryCall(connection, requests, parse)
        connection.up.receive = lambda item: server.open(connection, item)
        if server.process.is_dead:
            connection.down.cut(LOST)
        connection.up.send(_Open(method))
        self._calls.append(call)
        return call

    def unary_unary(self, *_, **__):
        raise NotImplementedError

    stream_unary = unary_unary

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        raise NotImplementedError

    async def wait_for_state_change(self, last_observed_state: object) -> None:
        raise NotImplementedError

    async def channel_ready(self) -> None:
        raise NotImplementedError


# ---- servers ------------------------------------------------------------------------------------


class _AbortError(Exception):
    """A handler has ended its call with a status."""


class MemoryContext:
    """What a handler knows of its call."""

    def __init__(self, peer: str) -> None:
        self.aborted: _End | None = None
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self.aborted = _End(code, details)
        raise _AbortError


@dataclass(frozen=True)
class _Handled:
    """A call that a handler serves."""

    connection: Connection
    inbox: "asyncio.Queue[object]"  # its requests


class MemoryServer(grpc.aio.Server):
    """Runs the handlers of one process."""

    def __init__(self, network: MemoryNetwork) -> None:
        process = current_process()
        assert process is not None
        self.process = process
        self._network = network
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._address = ""
        self._is_open = False
        self._running: dict[asyncio.Task[None], _Handled] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        self._handlers += generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """The same ones, for faster look-up."""

    def add_insecure_port(self, address: str) -> int:
        port = self._network.new_port()
        self._address = f"{address.rpartition(':')[0]}:{port}"
        return port

    def add_secure_port(self, address: str, server_credentials: object) -> int:
        raise NotImplementedError

    async def start(self) -> None:
        self._is_open = True
        self._network.listen(self._address, self)

    async def stop(self, grace: float | None) -> None:
        self._is_open = False
        if self._running and grace:
            await asyncio.wait(self._running, timeout=grace)
        for task in list(self._running):
            self._cancel(task)
        if self._running:
            await asyncio.wait(self._running)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        raise NotImplementedError

    def open(self, connection: Connection, item: object) -> None:
        """The first word of a connection: it is a call, unless it was cut before."""
        if not isinstance(item, _Open) or not self._is_open:
            connection.down.cut(_End(grpc.StatusCode.UNAVAILABLE, "nobody listens there"))
            self._network.wires.forget(connection)
            return
        details = SimpleNamespace(method=item.method, invocation_metadata=())
        handler = next(h for g in self._handlers if (h := g.service(details)) is not None)
        inbox: asyncio.Queue[object] = asyncio.Queue()
        task = asyncio.get_running_loop().create_task(self._run(handler, connection, inbox))
        self._running[task] = _Handled(connection, inbox)
        task.add_done_callback(partial(self._ended, connection))

        def receive(item: object) -> None:
            if item is _OVER or not isinstance(item, _End):
                inbox.put_nowait(item)
            else:
                self._cancel(task)

        connection.up.receive = receive

    def _cancel(self, task: "asyncio.Task[None]") -> None:
        """The call is over for the other side, or for the server: its requests end, and its handler
        is cancelled, one of them a bit earlier than the other.
        """
        if (handled := self._running.get(task)) is not None:
            handled.inbox.put_nowait(_OVER)
            handled.connection.down.cut(_CANCELLED)
            later_s = handled.connection.random.choice(CANCEL_LATER_S)
            asyncio.get_running_loop().call_later(later_s, task.cancel)

    async def _run(
        self, handler: Any, connection: Connection, inbox: "asyncio.Queue[object]"
    ) -> None:
        context = MemoryContext(connection.client.name)
        requests = _requests(inbox, handler.request_deserializer)
        end = _OVER
        try:
            if handler.request_streaming:
                answers = handler.stream_stream(requests, context)
            else:
                answers = handler.unary_stream(await anext(requests), context)
            async for answer in answers:
                connection.down.send(handler.response_serializer(answer))
        except StopAsyncIteration:
            end = _CANCELLED  # its client had gone before it said anything
        except _AbortError:
            assert context.aborted is not None
            end = context.aborted
        except asyncio.CancelledError:
            end = _End(grpc.StatusCode.CANCELLED, "the server ends")
            raise
        except Exception as error:  # as gRPC does: the client is told, the server goes on
            self._network.faults.append(f"{self.process.name}: {error!r}")
            end = _End(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            connection.down.cut(end)

    def _ended(self, connection: Connection, task: "asyncio.Task[None]") -> None:
        """The handler is over, and may never have begun."""
        del self._running[task]
        connection.down.cut(_End(grpc.StatusCode.CANCELLED, "the server ends"))
        self._network.wires.forget(connection)


async def _requests(
    inbox: "asyncio.Queue[object]", parse: Callable[[bytes], Any]
) -> AsyncIterator[Any]:
    while isinstance(item := await inbox.get(), bytes):
        yield parse(item)
