"""A client that says byte by byte what it likes, and hears everything."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field

PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came until the server hung up."""

    raw: bytes
    after_s: float = field(compare=False)

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def message(self) -> str:
        message: str = json.loads(self.raw.partition(b"\r\n\r\n")[2])["error"]["message"]
        return message


async def say(address: str, data: bytes, *, drip: bytes = b"", every_s: float = 0.05) -> Heard:
    """Send ``data``, then ``drip`` a byte at a time, over and over, until the server hangs up.

    Raises TimeoutError where it never does.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began_s = time.monotonic()
    dripping = asyncio.create_task(_drip(writer, drip, every_s))
    try:
        writer.write(data)
        async with asyncio.timeout(PATIENCE_S):
            raw = b""
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    raw += data
        return Heard(raw=raw, after_s=time.monotonic() - began_s)
    finally:
        dripping.cancel()
        writer.close()


async def _drip(writer: asyncio.StreamWriter, drip: bytes, every_s: float) -> None:
    while drip:
        for i in range(len(drip)):
            await asyncio.sleep(every_s)
            writer.write(drip[i : i + 1])
