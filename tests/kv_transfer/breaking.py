"""Parts of an endpoint that fail: links that can not be made or closed or that wait for others,
copies that can not be waited for, payloads for which there is no memory.
"""

from collections.abc import Sequence

import torch

from kv_transfer.endpoint import KvEndpoint
from kv_transfer.messages import Message
from kv_transfer.payload import Bytes, Payload
from kv_transfer.pieces import Copying, Pieces
from kv_transfer.receiver import Receiver
from kv_transfer.transports.inline import InlineLink
from kv_transfer.transports.transport import (
    Arrived,
    LinkSetting,
    PairMet,
    PayloadCame,
    Payloads,
    Stream,
)
from pdserve.core.errors import LinkDownError
from pdserve.core.kv_layout import BlockId


class _Whole:
    """A link in which nothing is broken."""

    payloads = Payloads.IN_HOST_MEMORY

    def __init__(self, stream: Stream, setting: LinkSetting) -> None:
        self.is_waiting = False
        self._link = InlineLink(stream, setting)

    def send(self, message: Message) -> None:
        self._link.send(message)

    def take_back(self, seq: int) -> None:
        self._link.take_back(seq)

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        return self._link.on(event)

    def check(self, now_s: float) -> None:
        self._link.check(now_s)

    def close(self) -> None:
        self._link.close()


class Unclosable(_Whole):
    """A link that is closed, and then says that it was not."""

    def __init__(self, stream: Stream, setting: LinkSetting, error: Exception) -> None:
        super().__init__(stream, setting)
        self._error = error

    def close(self) -> None:
        super().close()
        raise self._error


class Queued(_Whole):
    """A link whose payloads wait for the turn of another one, while the test says so."""

    def __init__(self, stream: Stream, setting: LinkSetting) -> None:
        super().__init__(stream, setting)
        self._kept: list[Message] = []

    def have_turn(self) -> None:
        self.is_waiting = False
        for message in self._kept:
            super().send(message)

    def send(self, message: Message) -> None:
        if self.is_waiting and message.payload is not None:
            self._kept.append(message)
        else:
            super().send(message)


def unclosable_memory(stream: Stream, setting: LinkSetting) -> Unclosable:
    return Unclosable(stream, setting, LinkDownError("CUDA IPC: cuIpcCloseMemHandle: sticky"))


def unclosable_group(stream: Stream, setting: LinkSetting) -> Unclosable:
    return Unclosable(stream, setting, RuntimeError("NCCL error: unhandled cuda error"))


def unclosable_file(stream: Stream, setting: LinkSetting) -> Unclosable:
    return Unclosable(stream, setting, OSError("read-only file system"))


def unclosable_for_no_known_reason(stream: Stream, setting: LinkSetting) -> Unclosable:
    return Unclosable(stream, setting, LookupError("nobody expects this"))


def one_link(stream: Stream, setting: LinkSetting) -> InlineLink:
    """Made by who dials if its directory is not full; then it is."""
    return _one_link(stream, setting, LinkDownError("no room for another link"))


def one_link_of_a_library(stream: Stream, setting: LinkSetting) -> InlineLink:
    return _one_link(stream, setting, LookupError("no room for another link"))


def _one_link(stream: Stream, setting: LinkSetting, error: Exception) -> InlineLink:
    full = setting.directory / "full"
    if stream.is_dialled and full.exists():
        raise error
    full.touch()
    return InlineLink(stream, setting)


class Stuck:
    """Pieces. The next ``num_failures`` calls to warm up, to drain or to wait for a copy fail, the
    next ``num_blind`` looks at a copy too, and calls named in ``lacking`` find no memory.
    """

    def __init__(self, pieces: Pieces) -> None:
        self.num_blocks = pieces.num_blocks
        self.num_failures = 0
        self.num_blind = 0
        self.num_begun = 0  # copies that are not known to be over
        self.num_gathering = 0  # likewise, out of the cache
        self.lacking: set[str] = set()
        self._pieces = pieces

    def warm_up(self, unit: int) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("CUDA out of memory")
        self._pieces.warm_up(unit)

    def blank(self, num_bytes: int) -> Payload:
        self._allocate("blank")
        return self._pieces.blank(num_bytes)

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        self._allocate("gather")
        self.num_gathering += 1
        return self._pieces.gather(blocks, pieces, heads, unit=unit)

    def drain(self) -> None:
        self.fail_if_asked()
        self.num_gathering = 0
        self._pieces.drain()

    def in_host_memory(self, payload: Payload) -> Bytes:
        return self._pieces.in_host_memory(payload)

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Copying:
        self._allocate("scatter")
        self._pieces.scatter(payload, blocks, pieces, heads, unit=unit)
        self.num_begun += 1
        return _StuckCopy(self)

    def fail_if_asked(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def _allocate(self, name: str) -> None:
        if name in self.lacking:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")


class _StuckCopy:
    def __init__(self, owner: Stuck) -> None:
        self._owner = owner

    @property
    def is_over(self) -> bool:
        if self._owner.num_blind:
            self._owner.num_blind -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return False

    def wait(self) -> None:
        self._owner.fail_if_asked()
        self._owner.num_begun -= 1


def stick(rank: KvEndpoint | Receiver) -> Stuck:
    """Its pieces from now on."""
    local = rank._local
    stuck = Stuck(local.pieces)
    object.__setattr__(local, "pieces", stuck)  # of a frozen class: no cache of a CPU is like this
    return stuck
