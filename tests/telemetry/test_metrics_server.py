"""The node's port for scrapes, called as strangers call it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from pdserve.core.errors import ConfigError
from pdserve.telemetry.metrics_server import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MetricsServer,
    start_metrics_server,
)

TEXT = "# HELP a A text.\n# TYPE a gauge\na 1\n"
GOOD = b"GET /metrics HTTP/1.1\r\nHost: node\r\nAccept: */*\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    server = await start_metrics_server("127.0.0.1", None, lambda: TEXT)
    running = asyncio.create_task(server.run())
    yield server
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def call(server: MetricsServer, said: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(said)
        writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    except OSError:
        return b""  # refused without a word
    finally:
        writer.close()


async def test_a_scrape_gets_the_numbers_and_the_connection_is_closed(
    server: MetricsServer,
) -> None:
    head, _, body = (await call(server, GOOD)).partition(b"\r\n\r\n")
    assert body.decode() == TEXT
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert f"Content-Length: {len(TEXT)}".encode() in head
    assert (await call(server, GOOD.replace(b"GET", b"HEAD"))) == head + b"\r\n\r\n"
    assert body in await call(server, GOOD.replace(b"/metrics", b"/metrics?name=a"))


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01 what is this", 400),
        (b"", 400),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", 400),
    ],
)
async def test_anything_else_is_refused(server: MetricsServer, said: bytes, status: int) -> None:
    assert (await call(server, said)).startswith(f"HTTP/1.1 {status} ".encode())
    assert (await call(server, GOOD)).endswith(TEXT.encode())


async def test_those_who_say_nothing_keep_no_more_than_their_connections(
    server: MetricsServer,
) -> None:
    silent = [
        await asyncio.open_connection("127.0.0.1", server.port) for _ in range(MAX_CONNECTIONS)
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with suppress(OSError):
        assert await reader.read() == b""
    for _, other in (*silent, (reader, writer)):
        other.close()
    async with asyncio.timeout(10):
        while not (await call(server, GOOD)).endswith(TEXT.encode()):
            await asyncio.sleep(0.01)


async def test_a_range_without_a_free_port_is_refused_by_its_key(server: MetricsServer) -> None:
    named = r"network\.port_range: no port .* observability\.node_metrics"
    with pytest.raises(ConfigError, match=named):
        await start_metrics_server("127.0.0.1", (server.port, server.port), lambda: TEXT)


async def test_a_closed_server_gives_its_port_back() -> None:
    server = await start_metrics_server("127.0.0.1", None, lambda: TEXT)
    port = server.port
    await server.close()
    again = await start_metrics_server("127.0.0.1", (port, port), lambda: TEXT)
    assert again.port == port
    await again.close()
