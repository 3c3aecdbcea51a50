"""``X-Request-Id``: the client's own label of a call, for logs and its own use, never a key here.

Every response carries it back; a call without one gets one.
"""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
MAX_LABEL_CHARS = 128
_SCOPE_KEY = "pdserve.label"


class RequestLabels:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = clean_label(Headers(scope=scope).get(HEADER, "")) or uuid.uuid4().hex
        scope[_SCOPE_KEY] = label

        async def send_with_label(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = label
            await send(message)

        await self._app(scope, receive, send_with_label)


def label_of(scope: Scope) -> str:
    """The label that the middleware gave."""
    label: str = scope[_SCOPE_KEY]
    return label


def clean_label(label: str) -> str:
    """What of a client's label may stand in a header and a log line."""
    return "".join(c for c in label[:MAX_LABEL_CHARS] if c.isascii() and c.isprintable())
