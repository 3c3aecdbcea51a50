"""The transport whose receivers fetch, within one process: what it maps is there already."""

from collections.abc import Iterator
from contextlib import contextmanager

from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.pull_link import PullLink
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


def lent_link(stream: Stream, setting: LinkSetting) -> PullLink:
    return PullLink(stream, setting, OwnMemory())


@contextmanager
def lending_in_process() -> Iterator[None]:
    """``cuda_ipc`` is the link above meanwhile."""
    real = TRANSPORTS[CUDA_IPC]
    TRANSPORTS[CUDA_IPC] = "tests.kv_transfer.lending:lent_link"
    try:
        yield
    finally:
        TRANSPORTS[CUDA_IPC] = real
