"""A link whose payloads the receiver fetches: it reads the sender's cache, which it has mapped.

    sending side                                   receiving side
      CacheOffer ────────────────────────────────────>     maps cache and leases
      Frame + Lent ──────────────────────────────────>     copies the blocks, then asks the lease

Nothing is staged, and nobody writes into another's memory: what a receiver cancels it does not
copy. What a sender cancels it takes back (``leases.py``).
"""

from typing import Protocol

from kv_transfer.messages import CacheOffer, Frame, Message, Warm
from kv_transfer.payload import Borrowed, Lent, RemoteCache
from kv_transfer.transports.cuda_memory import CudaMemory
from kv_transfer.transports.leases import Leases, LeaseView
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


class PullLink:
    """The protocol above over one stream."""

    payloads = Payloads.LENT

    def __init__(self, stream: Stream, setting: LinkSetting, memory: SharedMemory) -> None:
        self._stream = stream
        self._setting = setting
        self._memory = memory
        self._leases = Leases() if stream.is_dialled else None
        self._mapped: int | None = None  # what is to be closed
        self._cache: RemoteCache | None = None
        self._view: LeaseView | None = None

    def send(self, message: Message) -> None:
        match message.body:
            case Warm() if self._leases is not None:
                self._stream.send(Message(self._offer(self._leases)))
            case Frame(seq=seq):
                assert self._leases is not None, "frames go from the side that dialled"
                self._leases.lend(seq)
        self._stream.send(message)

    def take_back(self, seq: int) -> None:
        if self._leases is not None:
            self._leases.take_back(seq)

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        if not isinstance(event, Arrived) or event.message.announced is not None:
            raise LinkDownError("a payload out of band on a link that fetches them")
        message = event.message
        match message.body, message.payload:
            case CacheOffer() as offer, None:
                self._map(offer)
                return None
            case Warm(), None if self._leases is not None:
                self._leases.opened()
                return message
            case Frame(seq=seq), Lent() as lent:
                return Message(message.body, self._borrow(seq, lent))
            case _, None:
                return message
        raise LinkDownError("a payload inside a message on a link that fetches them")

    def check(self, now_s: float) -> None:
        """Nothing is under way here that could be overdue."""

    def close(self) -> None:
        self._stream.close()
        if self._leases is not None:
            self._leases.close()
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self._cache = None
            self._memory.close(mapped)

    def _offer(self, leases: Leases) -> CacheOffer:
        kv = self._setting.kv
        memory, offset = self._memory.export(kv.data_ptr())
        return CacheOffer(
            memory=memory,
            offset=offset,
            num_blocks=kv.shape[0],
            num_heads=kv.shape[1],
            block_size=kv.shape[4],
            block_stride_bytes=kv.stride(0) * kv.element_size(),
            leases=leases.path,
        )

    def _map(self, offer: CacheOffer) -> None:
        if self._stream.is_dialled or self._mapped is not None:
            raise LinkDownError("a cache is offered once, by the side that dialled")
        self._view = LeaseView(offer.leases)
        self._mapped = self._memory.open(offer.memory)
        self._cache = RemoteCache(
            address=self._mapped + offer.offset,
            num_blocks=offer.num_blocks,
            num_heads=offer.num_heads,
            block_size=offer.block_size,
            block_stride_bytes=offer.block_stride_bytes,
        )

    def _borrow(self, seq: int, lent: Lent) -> Borrowed:
        cache, view = self._cache, self._view
        if cache is None or view is None:
            raise LinkDownError("blocks are lent before their cache is offered")
        return Borrowed(lent=lent, cache=cache, is_valid=lambda: view.holds(seq))


def cuda_ipc_link(stream: Stream, setting: LinkSetting) -> PullLink:
    """From GPU to GPU of one host, between two processes."""
    return PullLink(stream, setting, CudaMemory(setting.kv.device))
