"""Who may call which gRPC method: with API keys, who has one; health checks everybody.

A call that is refused ends before its message is read.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health

from pdserve.core.errors import UnauthenticatedError
from router.callers import Callers
from router.grpc_decoding import Context, FoundHandler, fail

PUBLIC = f"/{health.SERVICE_NAME}/"
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"


class RequireKey(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED where the key is missing or wrong."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        if not handler_call_details.method.startswith(PUBLIC):
            try:
                self._callers.caller(authorization_of(handler_call_details.invocation_metadata))
            except UnauthenticatedError as error:
                return self._refusal(error)
        return await continuation(handler_call_details)

    def _refusal(self, error: UnauthenticatedError) -> FoundHandler:
        async def refuse(requests: AsyncIterator[Any], context: Context) -> None:
            self._callers.refused(context.peer(), error)
            await fail(context, error)

        # A method that streams reads nothing by itself, whatever the client's side of it is.
        return grpc.stream_unary_rpc_method_handler(refuse)


def traceparent_of(metadata: Metadata) -> str | None:
    """A call's W3C trace context."""
    return _value_of(metadata, "traceparent")


def authorization_of(metadata: Metadata) -> str | None:
    """A call's ``authorization`` metadata, as HTTP's header."""
    return _value_of(metadata, "authorization")


def _value_of(metadata: Metadata, wanted: str) -> str | None:
    for key, value in metadata or ():
        if key == wanted and isinstance(value, str):
            return value
    return None
