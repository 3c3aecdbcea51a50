"""A TCP proxy between two processes that does to their bytes what networks do."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

CHUNK = 1 << 16
GARBAGE = bytes(range(251)) * 2


Fault = Callable[["Proxy"], None]


class Proxy:
    """Forwards to ``target`` (host:port). ``start_proxy`` makes it; its faults hold until ``heal``.

    Every fault is for what is connected now and, but for ``cut``, for what connects later.
    """

    def __init__(self, target: str, *, spoils_toward_caller: bool = True) -> None:
        self.address = ""
        self._target = target
        self._spoils_toward_caller = spoils_toward_caller
        self._num_bytes = 0  # forwarded in the direction that is spoilt
        self._armed: tuple[int, Fault] | None = None
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._delay_s = 0.0
        self._spoil: Callable[[bytes], bytes] | None = None  # the next chunk toward the caller

    def arm(self, fault: Fault, *, after_bytes: int) -> None:
        """Do ``fault`` once so many more bytes have gone through."""
        self._armed = (self._num_bytes + after_bytes, fault)

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

    def corrupt(self) -> None:
        """One bit of the next bytes is another."""
        self._spoil = _flip_a_bit

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
        for source, sink, is_back in ((reader, onward, False), (there, writer, True)):
            spoils = is_back == self._spoils_toward_caller
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
                    if spoils:
                        self._count(len(data))
                    if spoils and self._spoil is not None:
                        data, self._spoil = self._spoil(data), None
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.close()

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._armed is not None and self._num_bytes >= self._armed[0]:
            fault, self._armed = self._armed[1], None
            fault(self)


def _flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


async def start_proxy(target: str, *, spoils_toward_caller: bool = True) -> Proxy:
    proxy = Proxy(target, spoils_toward_caller=spoils_toward_caller)
    await proxy.start()
    return proxy


FAULTS: dict[str, Fault] = {
    "cut": Proxy.cut,
    "frozen": Proxy.freeze,
    "slow": Proxy.delay,
    "garbled": Proxy.garble,
    "doubled": Proxy.duplicate,
}
