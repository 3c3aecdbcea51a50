"""How many of all calls those may be that are not of our own service: health checks, which ask for
no key, and reflection. Without a bound they could leave no place for any other call.

    streams        as many as the share of their method; one more is refused
    single calls   likewise, but the one that came first ends for one more: a client that sends its
                   message has its answer long before, one that sends none keeps nobody out
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc

from router.grpc_decoding import Context, FoundHandler, Single

SHARE = 64  # calls of one method
_PART_OF_ALL = 8  # where few calls are allowed at all, a share is this part of them

Stream = Callable[[AsyncIterator[Any], Context], AsyncGenerator[Any, None]]


class BoundShares(grpc.aio.ServerInterceptor):
    """Answers RESOURCE_EXHAUSTED beyond a share. ``own_service`` has none; ``max_calls``: of all.

    Stands around ``ReadOneMessage``, so that each handler that it sees takes a stream.
    """

    def __init__(self, own_service: str, *, max_calls: int) -> None:
        self._own_prefix = f"/{own_service}/"
        self._most = min(SHARE, max(1, max_calls // _PART_OF_ALL))
        self._num_streams: Counter[str] = Counter()
        self._singles: dict[str, OrderedDict[asyncio.Timeout, None]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method.startswith(self._own_prefix):
            return handler
        assert handler.request_streaming
        if handler.response_streaming:
            stream = cast(Stream, handler.stream_stream)  # stubs know the synchronous server's only
            return grpc.stream_stream_rpc_method_handler(
                self._bounded_stream(method, stream),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            self._bounded_single(method, cast(Single, handler.stream_unary)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _bounded_stream(self, method: str, stream: Stream) -> Stream:
        async def answer(
            requests: AsyncIterator[Any], context: Context
        ) -> AsyncGenerator[Any, None]:
            if self._num_streams[method] >= self._most:
                await self._refuse(method, context)
            self._num_streams[method] += 1
            try:
                async with aclosing(stream(requests, context)) as messages:
                    async for message in messages:
                        yield message
            finally:
                self._num_streams[method] -= 1

        return answer

    def _bounded_single(self, method: str, single: Single) -> Single:
        open_calls = self._singles.setdefault(method, OrderedDict())

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: ANN401
            if len(open_calls) >= self._most:
                first, _ = open_calls.popitem(last=False)
                first.reschedule(asyncio.get_running_loop().time())
            try:
                async with asyncio.timeout(None) as ending:
                    open_calls[ending] = None
                    try:
                        return await single(requests, context)
                    finally:
                        open_calls.pop(ending, None)
            except TimeoutError:
                await self._refuse(method, context)

        return answer

    async def _refuse(self, method: str, context: Context) -> None:
        problem = f"{method}: at most {self._most} such calls are allowed at once"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
