"""A link whose payloads the receiver fetches: it reads the sender's cache, which it has mapped.

    sending side                                   receiving side
      CacheOffer, Warm ──────────────────────────────>     maps cache and leases, connects the line
           <───────────────────────────────────── Warm
      Frame + Lent ════════════ line ════════════════>     copies the blocks, then asks the lease
           <═══════════════════ line ═══════ Delivered

Nothing is staged, and nobody writes into another's memory: what a receiver cancels it does not
copy. What a sender cancels it takes back (``leases.py``). All that follows the Warms goes over the
line (``line.py``).
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from kv_transfer.messages import CacheOffer, Frame, Message, Warm
from kv_transfer.payload import Borrowed, Lent, RemoteCache
from kv_transfer.transports.cuda_memory import CudaMemory
from kv_transfer.transports.leases import Leases, LeaseView
from kv_transfer.transports.line import Line, Listening, connect
from kv_transfer.transports.transport import (
    Arrived,
    LinkSetting,
    PairMet,
    PayloadCame,
    Payloads,
    Stream,
)
from pdserve.core.errors import LinkDownError


class SharedMemory(Protocol):
    """How memory of one process is opened in another. Raises LinkDownError."""

    def export(self, address: int) -> tuple[bytes, int]:
        """What the other process opens, and the offset of ``address`` within that."""

    def open(self, exported: bytes) -> int:
        """Its address in this process."""

    def close(self, address: int) -> None:
        """Nothing may use it any more."""


class Way(Protocol):
    """One end of a line."""

    def send(self, message: Message) -> None:
        """Never waits. What comes from the other end comes as the stream's."""

    def close(self) -> None: ...


class Awaiting(Protocol):
    """The sender's line before the receiver has come to it."""

    @property
    def path(self) -> str: ...

    def accept(self, stream: Stream, setting: LinkSetting) -> Way:
        """Raises LinkDownError if it has not come."""

    def close(self) -> None: ...


class Lines(Protocol):
    """How processes of one host talk past the stream."""

    def listen(self, path: str) -> Awaiting:
        """Raises LinkDownError if that can not be."""

    def connect(self, path: str, stream: Stream, setting: LinkSetting) -> Way:
        """Raises LinkDownError if nobody listens there."""


class LocalLines:
    """Through sockets in the file system."""

    def listen(self, path: str) -> Listening:
        return Listening(path)

    def connect(self, path: str, stream: Stream, setting: LinkSetting) -> Line:
        return connect(path, stream, setting)


class _Lending:
    """The sender's part: what it offers, and where it waits for the receiver."""

    def __init__(self, lines: Lines, directory: Path) -> None:
        with ExitStack() as undo:
            self.leases = Leases(directory)
            undo.callback(self.leases.close)
            self.awaiting = lines.listen(f"{self.leases.path}.line")
            undo.pop_all()

    def accept(self, stream: Stream, setting: LinkSetting) -> Way:
        """The receiver has opened all: nobody else needs its names."""
        self.leases.opened()
        return self.awaiting.accept(stream, setting)

    def close(self) -> None:
        try:
            self.leases.close()
        finally:
            self.awaiting.close()


class PullLink:
    """The protocol above over one stream. Raises LinkDownError if it can not lend."""

    payloads = Payloads.LENT
    is_waiting = False

    def __init__(
        self, stream: Stream, setting: LinkSetting, memory: SharedMemory, lines: Lines
    ) -> None:
        self._stream = stream
        self._setting = setting
        self._memory = memory
        self._lines = lines
        self._lending = _Lending(lines, setting.directory) if stream.is_dialled else None
        self._line: Way | None = None  # for all that follows the Warms
        self._mapped: int | None = None  # what is to be closed
        self._cache: RemoteCache | None = None
        self._view: LeaseView | None = None

    def send(self, message: Message) -> None:
        match message.body:
            case Warm():
                if self._lending is not None:
                    self._stream.send(Message(self._offer(self._lending)))
                self._stream.send(message)
                return
            case Frame(seq=seq):
                assert self._lending is not None, "frames go from the side that dialled"
                self._lending.leases.lend(seq)
        (self._line or self._stream).send(message)

    def take_back(self, seq: int) -> None:
        if self._lending is not None:
            self._lending.leases.take_back(seq)

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        if not isinstance(event, Arrived) or event.message.announced is not None:
            raise LinkDownError("a payload out of band on a link that fetches them")
        message = event.message
        match message.body, message.payload:
            case CacheOffer() as offer, None:
                self._map(offer)
                return None
            case Warm(), None if self._lending is not None:
                self._line = self._lending.accept(self._stream, self._setting)
                return message
            case Frame(seq=seq), Lent() as lent:
                return Message(message.body, self._borrow(seq, lent))
            case _, None:
                return message
        raise LinkDownError("a payload inside a message on a link that fetches them")

    def check(self, now_s: float) -> None:
        """Nothing is under way here that could be overdue."""

    def close(self) -> None:
        with ExitStack() as closing:  # all of it, whatever fails; the last is the first
            closing.callback(self._unmap)
            if self._lending is not None:
                closing.callback(self._lending.close)
            if self._line is not None:
                closing.callback(self._line.close)
            closing.callback(self._stream.close)

    def _offer(self, lending: _Lending) -> CacheOffer:
        kv = self._setting.kv
        memory, offset = self._memory.export(kv.data_ptr())
        return CacheOffer(
            memory=memory,
            offset=offset,
            num_blocks=kv.shape[0],
            num_heads=kv.shape[1],
            block_size=kv.shape[4],
            block_stride_bytes=kv.stride(0) * kv.element_size(),
            leases=lending.leases.path,
            line=lending.awaiting.path,
        )

    def _map(self, offer: CacheOffer) -> None:
        if self._stream.is_dialled or self._mapped is not None:
            raise LinkDownError("a cache is offered once, by the side that dialled")
        self._view = LeaseView(offer.leases)
        self._line = self._lines.connect(offer.line, self._stream, self._setting)
        self._mapped = self._memory.open(offer.memory)
        self._cache = RemoteCache(
            address=self._mapped + offer.offset,
            num_blocks=offer.num_blocks,
            num_heads=offer.num_heads,
            block_size=offer.block_size,
            block_stride_bytes=offer.block_stride_bytes,
        )

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._cache = None
            self._memory.close(mapped)

    def _borrow(self, seq: int, lent: Lent) -> Borrowed:
        cache, view = self._cache, self._view
        if cache is None or view is None:
            raise LinkDownError("blocks are lent before their cache is offered")
        return Borrowed(lent=lent, cache=cache, check_valid=lambda: view.check(seq))


def cuda_ipc_link(stream: Stream, setting: LinkSetting) -> PullLink:
    """From GPU to GPU of one host, between two processes."""
    return PullLink(stream, setting, CudaMemory(setting.kv.device), LocalLines())
