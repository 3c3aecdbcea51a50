"""The HTTP port of a node, from which Prometheus scrapes: ``GET /metrics`` and nothing else.

Lives in the node's event loop and takes of it what one answer a scrape costs. A call that is long,
slow or not understood is refused and its connection closed; so is each after its answer.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from pdserve.core.errors import ConfigError
from pdserve.telemetry.exposition import CONTENT_TYPE

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 16
CALL_TIMEOUT_S = 5.0  # from the connection to the last byte of the answer

Expose = Callable[[], str]


class MetricsServer:
    """Made by ``start_metrics_server``; serves until ``run`` is cancelled."""

    def __init__(self, server: asyncio.Server, calls: "_Calls") -> None:
        self._server = server
        self._calls = calls

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def run(self) -> None:
        """At its end the port is free and no call is left."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await self.close()

    async def close(self) -> None:
        """Of a server that nobody runs."""
        self._server.close()
        await self._calls.close()


async def start_metrics_server(
    host: str, port_range: tuple[int, int] | None, expose: Expose
) -> MetricsServer:
    """Listen on a free port of the range. Raises ConfigError where none is."""
    calls = _Calls(expose)
    low, high = port_range or (0, 0)
    for port in range(low, high + 1):
        with suppress(OSError):
            server = await asyncio.start_server(calls.begin, host, port, limit=MAX_HEAD_BYTES)
            return MetricsServer(server, calls)
    raise ConfigError(
        f"network.port_range: no port on {host} in {low}..{high} is free for a node's metrics; "
        "widen it, or set observability.node_metrics to false"
    )


class _Calls:
    """The open connections."""

    def __init__(self, expose: Expose) -> None:
        self._expose = expose
        self._open: set[asyncio.Task[None]] = set()

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        call = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._open.add(call)
        call.add_done_callback(self._open.discard)

    async def close(self) -> None:
        for call in self._open:
            call.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    writer.write(self._response(await _head(reader)))
                    writer.close()  # after the last byte
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    def _response(self, head: bytes | None) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ") if head else []
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):  # noqa: PLR2004
            return _refusal(HTTPStatus.BAD_REQUEST)
        if words[1].split(b"?", 1)[0] != b"/metrics":
            return _refusal(HTTPStatus.NOT_FOUND)
        if words[0] not in {b"GET", b"HEAD"}:
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        body = self._expose().encode()
        whole = _message(HTTPStatus.OK, CONTENT_TYPE, body)
        return whole if words[0] == b"GET" else whole[: -len(body)]


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """A call's head; None where it is too long or ends before its end."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


def _refusal(status: HTTPStatus) -> bytes:
    return _message(status, "text/plain; charset=utf-8", f"{status.phrase}\n".encode())


def _message(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
