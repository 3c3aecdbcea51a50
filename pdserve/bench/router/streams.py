"""Clients that ask for completions over HTTP, streamed or whole, and count what comes, with little
work of their own.

Each has a connection and starts its next request when one has ended. Tokens are counted in the
bytes: the fake node always says the same token, whose text stands nowhere else in the answer.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import cast

from pdserve.core.errors import InternalError

EVENT, LAST = b"data: ", b"[DONE]"
LAST_OF_WHOLE = b'"usage"'
MAX_PATTERN = 16  # bytes of what is looked for
CHECK_S = 0.05


@dataclass(slots=True)
class Counts:
    """What all clients have got so far."""

    tokens: int = 0
    events: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every client asks for."""

    host: str
    port: int
    prompt: str
    max_tokens: int
    token_text: str
    stream: bool

    def as_bytes(self) -> bytes:
        body = json.dumps(
            {
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": self.stream,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class StreamClient(asyncio.Protocol):
    """One connection. ``failed`` holds what went wrong, if anything did."""

    def __init__(self, asked: Asked, counts: Counts) -> None:
        self.first_byte = asyncio.Event()  # of an answer's first event
        self.failed: str | None = None
        self._asked = asked
        self._request = asked.as_bytes()
        self._token = asked.token_text.encode()
        self._counts = counts
        self._tail = b""
        self._num_tokens = 0  # of this request
        self._transport: asyncio.WriteTransport | None = None
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        tail = self._tail
        events = _new(EVENT, tail, data)
        tokens = _new(self._token, tail, data)
        self._counts.events += events
        self._counts.tokens += tokens
        self._num_tokens += tokens
        self._tail = (tail + data)[-MAX_PATTERN:]
        if (events or tokens) and not self.first_byte.is_set():
            self.first_byte.set()
        if _new(LAST if self._asked.stream else LAST_OF_WHOLE, tail, data):
            self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            self.failed = f"the router closed a connection: {exc}"

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _ended(self) -> None:
        self._counts.events += -1 if self._asked.stream else 1  # [DONE] is none
        self._counts.requests += 1
        if self._num_tokens != self._asked.max_tokens:
            self.failed = f"{self._num_tokens} tokens of {self._asked.max_tokens} came"
            self.close()
        elif self._transport is not None:
            self._num_tokens = 0
            self._transport.write(self._request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What came in a span of time."""

    duration_s: float
    tokens: int
    events: int


async def connect(asked: Asked, num_streams: int) -> tuple[list[StreamClient], Counts]:
    """So many clients, all of which have had their first token."""
    loop, counts = asyncio.get_running_loop(), Counts()
    clients = []
    for _ in range(num_streams):
        _, client = await loop.create_connection(
            lambda: StreamClient(asked, counts), asked.host, asked.port
        )
        clients.append(client)
    async with asyncio.timeout(60.0):
        for client in clients:
            await client.first_byte.wait()
    return clients, counts


async def count(clients: list[StreamClient], counts: Counts, duration_s: float) -> Streamed:
    """Let them stream. Raises InternalError where one did not get what it asked for."""
    tokens, events, start_s = counts.tokens, counts.events, time.perf_counter()
    while time.perf_counter() < start_s + duration_s:
        await asyncio.sleep(CHECK_S)
        for client in clients:
            if client.failed:
                raise InternalError(f"a stream failed: {client.failed}")
    return Streamed(
        duration_s=time.perf_counter() - start_s,
        tokens=counts.tokens - tokens,
        events=counts.events - events,
    )


def _new(pattern: bytes, tail: bytes, data: bytes) -> int:
    """How often ``pattern`` ends within ``data``, which comes after ``tail``."""
    before = tail[-(len(pattern) - 1) :]
    return (before + data[: len(pattern) - 1]).count(pattern) + data.count(pattern)
