"""What both ends of a session stream share: an outbox that never blocks its owner, and silence as
an error.

A session is one bidirectional gRPC stream between two processes. Each end sends something at least
every ``HEARTBEAT_S``; an end that hears nothing for ``silence_s`` takes the other for dead.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

import grpc

from pdserve.core.errors import NodeLostError

PROTOCOL_VERSION = 3
HEARTBEAT_S = 1.0
DEFAULT_SILENCE_S = 5.0
MAX_MESSAGE_BYTES = 64 << 20

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


class Outbox(Generic[Message]):
    """Messages waiting to be written to one stream; iterate it to send them. ``put`` never waits.

    With ``idle_message`` the iteration yields that message whenever nothing else came for
    HEARTBEAT_S.
    """

    def __init__(self, idle_message: Message | None = None) -> None:
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()
        self._idle_message = idle_message
        self._closed = False

    def put(self, message: Message) -> None:
        if not self._closed:
            self._queue.put_nowait(message)

    def close(self) -> None:
        """End the iteration after what was put before."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S if self._idle_message is not None else None):
                    message = await self._queue.get()
            except TimeoutError:
                assert self._idle_message is not None
                message = self._idle_message
            if message is None:
                return
            yield message


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
