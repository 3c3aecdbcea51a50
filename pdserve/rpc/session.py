"""What both ends of a session stream share: an outbox that never blocks its owner, and silence as
an error.

A session is one bidirectional gRPC stream between two processes. Each end sends something at least
every ``HEARTBEAT_S``; an end that hears nothing for ``silence_s`` takes the other for dead.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, Protocol, TypeVar

import grpc

from pdserve.core.errors import NodeLostError

PROTOCOL_VERSION = 4
HEARTBEAT_S = 1.0
DEFAULT_SILENCE_S = 5.0
MAX_MESSAGE_BYTES = 64 << 20

# What may wait for a peer that does not read. Outputs come at the pace of tokens: it is minutes of
# them. Requests come in bursts: all those of a node that is lost go to another one in one turn.
MAX_OUTPUT_BYTES = 64 << 20
MAX_REQUEST_BYTES = 512 << 20

# Sessions live for days beside bursts of work: gRPC's own keepalive stays off (under five minutes
# it earns a GOAWAY), heartbeats are messages.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),  # nodes are near each other, whatever the environment says
)

Message = TypeVar("Message")


class Sendable(Protocol):
    """What a stream carries: any message of ours."""

    def ByteSize(self) -> int: ...


Sent = TypeVar("Sent", bound=Sendable)


class Outbox(Generic[Sent]):
    """Messages waiting to be written to one stream; iterate it to send them. ``put`` never waits.

    With ``idle_message`` the iteration yields that message whenever nothing else came for
    HEARTBEAT_S. When more than ``max_bytes`` wait, the peer does not read: all of it is dropped,
    nothing more is taken, and ``check`` says so to whoever listens to that peer.
    """

    def __init__(
        self, idle_message: Sent | None = None, *, max_bytes: int = MAX_REQUEST_BYTES
    ) -> None:
        self._waiting: deque[tuple[Sent, int]] = deque()
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._idle_message = idle_message
        self._news = asyncio.Event()
        self._closed = False
        self._overflow: str | None = None

    def put(self, message: Sent) -> None:
        if self._closed:
            return
        size = message.ByteSize()
        if self._waiting and self._num_bytes + size > self._max_bytes:
            num_bytes = self._num_bytes + size
            self._overflow = f"it does not read: {num_bytes} bytes of messages wait for it"
            self._waiting.clear()
            self.close()
            return
        self._waiting.append((message, size))
        self._num_bytes += size
        self._news.set()

    def close(self) -> None:
        """End the iteration after what was put before."""
        self._closed = True
        self._news.set()

    def check(self, peer: str) -> None:
        """Raises NodeLostError naming ``peer`` if it does not read what it is told."""
        if self._overflow is not None:
            raise NodeLostError(f"{peer}: {self._overflow}")

    async def __aiter__(self) -> AsyncGenerator[Sent, None]:
        while True:
            while self._waiting:
                message, size = self._waiting.popleft()
                self._num_bytes -= size
                yield message
            if self._closed:
                return
            self._news.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_S if self._idle_message is not None else None):
                    await self._news.wait()
            except TimeoutError:
                assert self._idle_message is not None
                yield self._idle_message


async def listen(
    messages: AsyncIterator[Message], *, peer: str, silence_s: float = DEFAULT_SILENCE_S
) -> AsyncGenerator[Message, None]:
    """Yield a stream's messages until the other side ends it.

    Raises NodeLostError naming ``peer`` when the stream breaks or nothing came for ``silence_s``.
    """
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise NodeLostError(f"{peer}: nothing heard for {silence_s:g} s") from error
        except grpc.RpcError as error:
            raise NodeLostError(f"{peer}: {_reason(error)}") from error
        yield message


def _reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
