"""As much of HTTP/2 as a client needs that calls gRPC methods and lets nobody send it anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, ACK, END_HEADERS = 1, 1, 4
WINDOW_OF_STREAMS = 4  # a setting
EMPTY_MESSAGE = b"\0\0\0\0\0"
PATIENCE_S = 10.0


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return b"".join(
        (len(data).to_bytes(3, "big"), bytes([kind, flags]), stream.to_bytes(4, "big"), data)
    )


def header(name: str, value: str) -> bytes:
    """Written out, in no table."""
    texts = (name.encode(), value.encode())
    return b"\0" + b"".join(bytes([len(text)]) + text for text in texts)


class TakingNothing:
    """A connection whose streams have no window. Made by ``taking_nothing``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_over = 0
        self._num_streams = self._num_answered = 0

    async def call(self, path: str) -> None:
        """With a whole message, which is empty."""
        stream = 2 * self._num_streams + 1
        self._num_streams += 1
        given = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "a"}
        grpc = {"te": "trailers", "content-type": "application/grpc"}
        head = b"".join(header(*each) for each in (given | grpc).items())
        self._writer.write(frame(HEADERS, END_HEADERS, stream, head))
        self._writer.write(frame(DATA, END_STREAM, stream, EMPTY_MESSAGE))
        await self._writer.drain()

    async def until_answered(self, count: int) -> None:
        """So many of its calls have their first headers; those of ``num_over`` have no others, as
        they have no message. Neither needs a window.
        """
        async with asyncio.timeout(PATIENCE_S):
            while self._num_answered < count:
                head = await self._reader.readexactly(9)
                await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == HEADERS:
                    self._num_answered += 1
                    self.num_over += bool(head[4] & END_STREAM)


@asynccontextmanager
async def taking_nothing(address: str) -> AsyncIterator[TakingNothing]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        window = WINDOW_OF_STREAMS.to_bytes(2, "big") + (0).to_bytes(4, "big")
        writer.write(PREFACE + frame(SETTINGS, 0, 0, window) + frame(SETTINGS, ACK, 0))
        yield TakingNothing(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()
