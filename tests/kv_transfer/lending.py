"""The transport whose receivers fetch, within one process: what it maps is there already."""

from collections.abc import Iterator
from contextlib import contextmanager

from kv_transfer.messages import Message
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.pull_link import LocalLines, PullLink
from kv_transfer.transports.transport import LinkSetting, Stream

CUDA_IPC = "cuda_ipc"


class OwnMemory:
    """Memory that both sides see at the same address. ``mapped``: what is open."""

    def __init__(self) -> None:
        self.mapped: list[int] = []

    def export(self, address: int) -> tuple[bytes, int]:
        return (address - 64).to_bytes(8, "little"), 64

    def open(self, exported: bytes) -> int:
        self.mapped.append(int.from_bytes(exported, "little"))
        return self.mapped[-1]

    def close(self, address: int) -> None:
        self.mapped.remove(address)


class StreamLine:
    """Nothing but the stream: it brings no thread along."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stream: Stream | None = None

    def accept(self, stream: Stream, setting: LinkSetting) -> "StreamLine":
        self._stream = stream
        return self

    def send(self, message: Message) -> None:
        assert self._stream is not None
        self._stream.send(message)

    def close(self) -> None:
        """The stream is closed by its owner."""


class StreamLines:
    """In place of sockets."""

    def listen(self, path: str) -> StreamLine:
        return StreamLine(path)

    def connect(self, path: str, stream: Stream, setting: LinkSetting) -> StreamLine:
        return StreamLine(path).accept(stream, setting)


def lent_link(stream: Stream, setting: LinkSetting) -> PullLink:
    return PullLink(stream, setting, OwnMemory(), LocalLines())


def threadless_lent_link(stream: Stream, setting: LinkSetting) -> PullLink:
    return PullLink(stream, setting, OwnMemory(), StreamLines())


@contextmanager
def lending_in_process(link: str = "lent_link") -> Iterator[None]:
    """``cuda_ipc`` is one of the links above meanwhile."""
    with in_place(CUDA_IPC, f"tests.kv_transfer.lending:{link}"):
        yield


@contextmanager
def in_place(transport: str, link: str) -> Iterator[None]:
    """The transport's links are others meanwhile, of our own."""
    real = TRANSPORTS[transport]
    TRANSPORTS[transport] = link
    try:
        yield
    finally:
        TRANSPORTS[transport] = real
