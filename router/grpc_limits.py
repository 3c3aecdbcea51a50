"""What the public gRPC service bounds: sizes, calls of a connection, idle connections, and how many
metadata entries a call has.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from pdserve.core.config import LimitsConfig
from pdserve.rpc.session import CHANNEL_OPTIONS
from router.grpc_decoding import Context, FoundHandler

MAX_CALLS_OF_CONNECTION = 1024
IDLE_MS = 15 * 60_000  # a connection without calls is closed
HANDSHAKE_MS = 10_000  # for TLS, and HTTP/2's first settings
PING_MS, PING_TIMEOUT_MS = 60_000, 20_000  # a client that does not answer is gone, with its calls
LEAST_PING_INTERVAL_MS = 10_000  # clients that ping more often are sent away


def public_options(limits: LimitsConfig) -> tuple[tuple[str, int], ...]:
    """Options of the public server."""
    own = {
        "grpc.max_receive_message_length": limits.max_body_bytes,
        "grpc.max_metadata_size": limits.max_header_bytes,
        "grpc.absolute_max_metadata_size": limits.max_header_bytes,
        "grpc.max_concurrent_streams": min(MAX_CALLS_OF_CONNECTION, limits.max_grpc_calls),
        "grpc.max_connection_idle_ms": IDLE_MS,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_MS,
        "grpc.http2.min_recv_ping_interval_without_data_ms": LEAST_PING_INTERVAL_MS,
        "grpc.http2.max_pings_without_data": 0,  # no bound
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.keepalive_time_ms": PING_MS,
        "grpc.keepalive_timeout_ms": PING_TIMEOUT_MS,
    }
    return tuple({**dict(CHANNEL_OPTIONS), **own}.items())


class BoundMetadata(grpc.aio.ServerInterceptor):
    """Answers RESOURCE_EXHAUSTED to a call with more than ``most`` metadata entries, before its
    message is read. gRPC itself bounds only their bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        count = len(tuple(handler_call_details.invocation_metadata or ()))
        if count <= self._most:
            return await continuation(handler_call_details)
        problem = f"metadata: got {count} entries, at most {self._most} are allowed"

        async def refuse(requests: AsyncIterator[Any], context: Context) -> None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)

        return grpc.stream_unary_rpc_method_handler(refuse)
