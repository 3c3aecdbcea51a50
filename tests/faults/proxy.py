"""A TCP proxy between two processes that does to their bytes what networks do."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

CHUNK = 1 << 16
GARBAGE = bytes(range(251)) * 2


class Proxy:
    """Forwards to ``target`` (host:port). ``start_proxy`` makes it; its faults hold until ``heal``.

    Every fault is for what is connected now and, but for ``cut``, for what connects later.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self._target = target
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._delay_s = 0.0
        self._spoil: Callable[[bytes], bytes] | None = None  # the next chunk toward the caller

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def cut(self) -> None:
        """All connections are reset, and nobody can connect."""
        self._refuses = True
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Nothing gets through any more, and nobody is told; it comes late, after ``heal``."""
        self._flows.clear()

    def delay(self) -> None:
        """Everything takes longer."""
        self._delay_s = 0.05

    def garble(self) -> None:
        """Bytes that nobody sent come before the next ones."""
        self._spoil = lambda data: GARBAGE + data

    def duplicate(self) -> None:
        """The next bytes come twice."""
        self._spoil = lambda data: data + data

    def heal(self) -> None:
        self._refuses, self._delay_s, self._spoil = False, 0.0, None
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        host, _, port = self._target.rpartition(":")
        try:
            there, onward = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward}
        for source, sink, spoils in ((reader, onward, False), (there, writer, True)):
            pipe = asyncio.create_task(self._forward(source, sink, spoils))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, spoils: bool
    ) -> None:
        try:
            with suppress(ConnectionError):
                while data := await source.read(CHUNK):
                    await self._flows.wait()
                    await asyncio.sleep(self._delay_s)
                    if spoils and self._spoil is not None:
                        data, self._spoil = self._spoil(data), None
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.close()


async def start_proxy(target: str) -> Proxy:
    proxy = Proxy(target)
    await proxy.start()
    return proxy


Fault = Callable[[Proxy], None]
FAULTS: dict[str, Fault] = {
    "cut": Proxy.cut,
    "frozen": Proxy.freeze,
    "slow": Proxy.delay,
    "garbled": Proxy.garble,
    "doubled": Proxy.duplicate,
}
