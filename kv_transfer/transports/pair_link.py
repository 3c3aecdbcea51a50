"""A link whose payloads travel through a process group of two ranks, made at run time.

    sending side                                   receiving side
      Frame + Announced ─────────────────────────────>     size and number of a parcel
           (first time: <───────────────── PairOffer)      where to meet; both make the group
           <──────────────────────────────────── Clear     the buffer is there
      Posting ───────────────────────────────────────>     the send is posted now: post the receive
      payload ══════════ process group ══════════════>     then the message counts as arrived

A receive is posted only on the sender's word: one that is posted for a dead sender spins on a GPU
for ever. No global world: the receiving rank hosts a store, its address travels over the stream.
Each pair has one thread that posts and waits; the endpoint's thread watches the deadline and
aborts. An overdue operation closes the pair, which is remade when its peer is connected again.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch

from kv_transfer.messages import Announced, Clear, Message, PairOffer, Posting
from kv_transfer.payload import Borrowed, Lent, Payload
from kv_transfer.transports.pair import MakeGroup, Pair, Receive, Send
from kv_transfer.transports.transport import (
    Arrived,
    LinkSetting,
    PairMet,
    PayloadCame,
    Payloads,
    Stream,
)
from pdserve.core.errors import LinkDownError

MAX_PARCEL_BYTES = 64 << 20

T = TypeVar("T")


class PairLink:
    """The protocol above over one stream. Payloads are tensors on ``device``, arrays on a CPU."""

    def __init__(
        self, stream: Stream, setting: LinkSetting, make_group: MakeGroup, device: torch.device
    ) -> None:
        self.payloads = Payloads.ON_DEVICE
        if device.type == "cpu":
            self.payloads = Payloads.IN_HOST_MEMORY
        self._stream = stream
        self._device = device
        self._memory_stream: torch.cuda.Stream | None = None
        if self.payloads is Payloads.ON_DEVICE:
            self._memory_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pair = Pair(stream, setting, make_group)
        self._has_begun = False
        self._has_met = False
        self._num_parcels = 0
        self._outgoing: dict[int, torch.Tensor] = {}
        self._announced: dict[int, tuple[Message, torch.Tensor]] = {}
        self._posted: dict[int, tuple[Message, torch.Tensor]] = {}

    def send(self, message: Message) -> None:
        if (payload := message.payload) is None:
            self._stream.send(message)
            return
        parcel, self._num_parcels = self._num_parcels, self._num_parcels + 1
        self._outgoing[parcel] = _as_tensor(payload)
        self._stream.send(Message(message.body, announced=Announced(parcel, len(payload))))

    def take_back(self, seq: int) -> None:
        """Nothing is lent: what was sent is a copy."""

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        match event:
            case PayloadCame(parcel=parcel):
                message, data = self._posted.pop(parcel)
                on_device = self.payloads is Payloads.ON_DEVICE
                return Message(message.body, data if on_device else data.numpy())
            case PairMet():
                self._has_met = True
                self._clear(self._announced)
            case Arrived(message=message):
                return self._on_message(message)
        return None

    def check(self, now_s: float) -> None:
        self._pair.check(now_s)

    def close(self) -> None:
        self._stream.close()
        self._pair.close()

    def _on_message(self, message: Message) -> Message | None:
        match message.body:
            case PairOffer() as offer:
                self._begin(is_offered=True)
                self._pair.join(offer)
            case Clear(parcel=parcel):
                self._pair.do(Send(parcel, _pop(self._outgoing, parcel)))
            case Posting(parcel=parcel):
                self._posted[parcel] = _pop(self._announced, parcel)
                self._pair.do(Receive(parcel, self._posted[parcel][1]))
            case _:
                return self._on_content(message)
        return None

    def _on_content(self, message: Message) -> Message | None:
        if message.payload is not None:
            raise LinkDownError("a payload inside a message on a link that moves them out of band")
        if (announced := message.announced) is None:
            return message
        parcel, num_bytes = announced.parcel, announced.num_bytes
        is_known = parcel in self._announced or parcel in self._posted
        if is_known or not 0 < num_bytes <= MAX_PARCEL_BYTES:
            raise LinkDownError(f"parcel {parcel} of {num_bytes} bytes announced")
        if not self._has_begun:
            self._begin(is_offered=False)
            self._pair.host()
        self._announced[parcel] = message, self._buffer(num_bytes)
        if self._has_met:
            self._clear([parcel])
        return None

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory for a payload. On a GPU it belongs to a stream of its own: memory of the stream on
        which the model runs may still be in use by a step.
        """
        if self._memory_stream is None:
            return torch.empty(num_bytes, dtype=torch.uint8)
        with torch.cuda.stream(self._memory_stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _begin(self, *, is_offered: bool) -> None:
        """The side that did not dial has the first payload announced to it, and offers."""
        if self._has_begun or is_offered != self._stream.is_dialled:
            raise LinkDownError("the wrong side of a link began to make its process group")
        self._has_begun = True

    def _clear(self, parcels: Iterable[int]) -> None:
        for parcel in parcels:
            self._stream.send(Message(Clear(parcel)))


def _pop(parcels: dict[int, T], parcel: int) -> T:
    if (item := parcels.pop(parcel, None)) is None:
        raise LinkDownError(f"parcel {parcel} is not one that this was due for")
    return item


def _as_tensor(payload: Payload) -> torch.Tensor:
    assert not isinstance(payload, Lent | Borrowed), "nothing is lent here"
    if isinstance(payload, torch.Tensor):
        return payload
    return torch.from_numpy(payload if payload.flags.writeable else payload.copy())
