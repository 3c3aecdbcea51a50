"""Reading a call's one message: bytes that are none, such as a text that is not UTF-8, and messages
that do not come.

gRPC itself answers the former with UNKNOWN, as if the server were at fault, and waits for the
latter as long as the client likes. Here the client is told that it is the one. Knows no method,
only handlers.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from pdserve.core.errors import InvalidRequestError, PdserveError, QueueDeadlineError
from pdserve.rpc.failures import metadata_of, status_of

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
FoundHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # None: no such method
Stream = Callable[[Any, Context], AsyncGenerator[Any, None]]
Single = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a request that could not be decoded."""

    problem: str


class ReadOneMessage(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where it cannot be decoded, DEADLINE_EXCEEDED where it does not come
    in ``timeout_s``; the handler is not called then.

    For all methods that take one message; those that answer with a stream are async generators.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        # gRPC hands a method that takes a stream over before anything has been read.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        answer = _streaming if handler.response_streaming else _single
        return make(
            answer(handler, self._timeout_s),
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


def _streaming(
    handler: Handler, timeout_s: float
) -> Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]:
    stream = cast(Stream, handler.unary_stream)  # the stubs know the synchronous server's only

    async def answer(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        request = await _read(requests, context, timeout_s)
        async with aclosing(stream(request, context)) as messages:
            async for message in messages:
                yield message

    return answer


def _single(handler: Handler, timeout_s: float) -> Single:
    single = cast(Single, handler.unary_unary)

    async def answer(requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: ANN401
        return await single(await _read(requests, context, timeout_s), context)

    return answer


async def _read(requests: AsyncIterator[Any], context: Context, timeout_s: float) -> Any:  # noqa: ANN401
    """The call's message; where it is none, the call ends here."""
    try:
        async with asyncio.timeout(timeout_s):
            request = await anext(requests, _Undecodable("no message came"))
    except TimeoutError:
        late = QueueDeadlineError(f"request: it took more than {timeout_s:g} s to come")
        await fail(context, late)
    if isinstance(request, _Undecodable):
        problem = f"it cannot be decoded: {request.problem}"
        await fail(context, InvalidRequestError("request", problem))
    return request
