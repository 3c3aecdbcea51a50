"""How many calls there are at once, and how many of them may be health checks, which ask for no
key, or reflection: without bounds of their own they could leave no place for any other call.

    our own methods    ``max_grpc_calls``, reflection with them
    other streams      a share for each method; one more is refused
    health checks      a share of those whose message has not come: for one more, the one that came
                       first ends, so who sends its message is not kept out by who does not. Of one
                       connection a few that are not over: one that takes no answers ends none

gRPC's own bound counts all calls alike, so it is not set. A call is over when its status is sent.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc

from router.grpc_decoding import Context, FoundHandler, Handler, Single

SHARE = 64  # calls of one method
MAX_CHECKS_OF_CONNECTION = 16
_PART_OF_ALL = 8  # where few calls are allowed at all, a share is this part of them

Stream = Callable[[AsyncIterator[Any], Context], AsyncGenerator[Any, None]]
Bounds = dict[str, tuple[int, str]]  # what is counted -> how many are allowed, and where


class BoundCalls(grpc.aio.ServerInterceptor):
    """Answers RESOURCE_EXHAUSTED beyond a bound, before the message is read. ``own``: how our own
    methods begin; ``public``: how health checks do.

    Stands around ``ReadOneMessage``, so that each handler that it sees takes a stream.
    """

    def __init__(self, *, own: str, public: str, max_calls: int) -> None:
        self._own, self._public = own, public
        self._max_calls = max_calls
        self._share = min(SHARE, max(1, max_calls // _PART_OF_ALL))
        self._num_open: Counter[str] = Counter()
        self._unsent: OrderedDict[asyncio.Timeout, None] = OrderedDict()  # health checks

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        assert handler.request_streaming
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(method, handler),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        is_check = method.startswith(self._public)
        return grpc.stream_unary_rpc_method_handler(
            self._check(method, handler) if is_check else self._single(method, handler),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _stream(self, method: str, handler: Handler) -> Stream:
        stream = cast(Stream, handler.stream_stream)  # the stubs know the synchronous server's only

        async def answer(
            requests: AsyncIterator[Any], context: Context
        ) -> AsyncGenerator[Any, None]:
            await self._count(context, self._bounds(method))
            async with aclosing(stream(requests, context)) as messages:
                async for message in messages:
                    yield message

        return answer

    def _single(self, method: str, handler: Handler) -> Single:
        single = cast(Single, handler.stream_unary)

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: ANN401
            await self._count(context, self._bounds(method))
            return await single(requests, context)

        return answer

    def _check(self, method: str, handler: Handler) -> Single:
        single = cast(Single, handler.stream_unary)

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:  # noqa: ANN401
            connection = {context.peer(): (MAX_CHECKS_OF_CONNECTION, "at once on a connection")}
            await self._count(context, connection)
            if len(self._unsent) >= self._share:
                first, _ = self._unsent.popitem(last=False)
                first.reschedule(asyncio.get_running_loop().time())
            try:
                async with asyncio.timeout(None) as ending:
                    self._unsent[ending] = None
                    try:
                        return await single(requests, context)
                    finally:
                        self._unsent.pop(ending, None)
            except TimeoutError:
                problem = f"{method}: more than {self._share} calls wait for their messages"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)

        return answer

    def _bounds(self, method: str) -> Bounds:
        bounds: Bounds = {}
        if not method.startswith(self._own):
            bounds[method] = (self._share, f"of {method} at once")
        if not method.startswith(self._public):
            bounds["all"] = (self._max_calls, "at once")
        return bounds

    async def _count(self, context: Context, bounds: Bounds) -> None:
        """Count the call until it is over; where it is one too many, it ends here."""
        for counted, (most, where) in bounds.items():
            if self._num_open[counted] >= most:
                problem = f"at most {most} calls are allowed {where}"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
        self._num_open.update(bounds.keys())
        # The stubs want an object of a class that there is not.
        context.add_done_callback(lambda _: self._uncount(bounds))  # type: ignore[arg-type]

    def _uncount(self, bounds: Bounds) -> None:
        for counted in bounds:
            self._num_open[counted] -= 1
            if not self._num_open[counted]:
                del self._num_open[counted]  # connections come and go
