"""Requests whose bytes are no message of the call, such as a text that is not UTF-8.

gRPC itself answers them with UNKNOWN, as if the server were at fault. Here the client is told that
it is the one. Knows no method, only handlers.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.core.errors import InvalidRequestError, PdserveError
from pdserve.rpc.failures import metadata_of, status_of

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
FoundHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # None: no such method
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]
Single = Callable[[Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a request that could not be decoded."""

    problem: str


class RefuseUndecodable(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT, and the handler is not called.

    For the methods of ``service`` that take one message; those that stream are async generators.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        handler = await continuation(handler_call_details)
        ours = handler_call_details.method.startswith(self._prefix)
        if handler is None or not ours or handler.request_streaming:
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            _streaming(handler) if handler.response_streaming else _single(handler),
            request_deserializer=_decoding(handler),
            response_serializer=handler.response_serializer,
        )


async def fail(context: Context, error: PdserveError) -> NoReturn:
    """End the call with the error's status, its text, and what a client of ours needs to know."""
    await context.abort(status_of(error), str(error), metadata_of(error))
    raise AssertionError("abort raises")


def _decoding(handler: Handler) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:  # noqa: ANN401 - any message
        decoder = handler.request_deserializer
        assert decoder is not None
        try:
            return decoder(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return decode


def _streaming(handler: Handler) -> Callable[[Any, Context], AsyncIterator[Any]]:
    stream = cast(Stream, handler.unary_stream)  # the stubs know the synchronous server's only

    async def answer(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
        if isinstance(request, _Undecodable):
            await _refuse(context, request)
        async with aclosing(stream(request, context)) as messages:
            async for message in messages:
                yield message

    return answer


def _single(handler: Handler) -> Single:
    single = cast(Single, handler.unary_unary)

    async def answer(request: Any, context: Context) -> Any:  # noqa: ANN401
        if isinstance(request, _Undecodable):
            await _refuse(context, request)
        return await single(request, context)

    return answer


async def _refuse(context: Context, request: _Undecodable) -> NoReturn:
    await fail(context, InvalidRequestError("request", f"it cannot be decoded: {request.problem}"))
