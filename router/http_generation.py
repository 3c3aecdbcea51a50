"""The HTTP answer of a call that generates: one JSON body, or server-sent events.

Owns the call from dispatch to the last byte: whatever ends first, the generation or the client's
connection, ends the other.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send

from pdserve.core.errors import PdserveError
from router.answer_format import AnswerFormat
from router.choice_text import Delta
from router.generation import Generation, GenerationRequest
from router.http_bodies import error_response
from router.http_labels import label_of
from router.http_turns import arrived_s_of
from router.service import Service
from router.stall import StallWatch

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
]

logger = logging.getLogger(__name__)


class GenerationResponse(Response):
    """Runs a generation and sends it.

    The status is decided by what comes first: an error before the first token has its own status,
    one after it ends the stream with an event that holds it.
    """

    def __init__(
        self,
        generating: AbstractContextManager[Generation],
        answer_format: AnswerFormat,
        *,
        stall_s: float,
    ) -> None:
        super().__init__()
        self._generating = generating
        self._format = answer_format
        self._stall_s = stall_s
        self._request_ids: tuple[str, ...] = ()  # once it is begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with StallWatch(self._stall_s) as watch:
                await self._answer_watched(scope, receive, _watched(send, watch))
        except TimeoutError:
            logger.warning(
                "a client that read nothing for %g s was dropped",
                self._stall_s,
                extra={"request_id": " ".join(self._request_ids)},
            )

    async def _answer_watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._generating as generation:
                self._request_ids = generation.request_ids
                if self._format.streamed:
                    await self._send_events(generation, send)
                    return
                answers = await generation.collect()
                body = self._format.whole(answers, generation)
            await Response(to_json(body), media_type="application/json")(scope, receive, send)
        except PdserveError as error:
            await error_response(error)(scope, receive, send)

    async def _send_events(self, generation: Generation, send: Send) -> None:
        deltas = aiter(generation)
        first: list[Delta] = await anext(deltas, [])  # an error until now has its own status
        await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
        try:
            await send(_body(self._events(first)))
            async for more in deltas:
                if events := self._events(more):
                    await send(_body(events))
            end = self._format.ending(generation)
        except PdserveError as error:
            end = self._format.failure(error)
        await send(_body(end, more=False))

    def _events(self, deltas: list[Delta]) -> bytes:
        if len(deltas) == 1:
            return self._format.events(deltas[0])
        return b"".join(map(self._format.events, deltas))


def answer(
    service: Service,
    request: Request,
    requests: Sequence[GenerationRequest],
    answer_format: AnswerFormat,
) -> GenerationResponse:
    """What a generating route returns."""
    return GenerationResponse(
        service.generate(
            requests,
            label=label_of(request.scope),
            authorization=request.headers.get("authorization"),
            arrived_s=arrived_s_of(request.scope),
            traceparent=request.headers.get("traceparent"),
        ),
        answer_format,
        stall_s=service.spec.config.limits.client_stall_s,
    )


def timeline_wanted(request: Request, field: bool | None) -> bool:
    """By the body's field, or by the header."""
    return bool(field) or request.headers.get("x-pdserve-timeline") == "1"


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _watched(send: Send, watch: StallWatch) -> Send:
    """``send`` during which the client is waited for."""

    async def send_watched(message: Message) -> None:
        watch.waits()
        await send(message)
        watch.goes_on()

    return send_watched


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
