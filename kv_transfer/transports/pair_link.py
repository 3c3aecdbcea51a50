"""A link whose payloads travel through a process group of two ranks, made at run time.

    sending side                                   receiving side
      (first time: PairOffer) ───────────────────────>     where to meet: both make the group, and
                                                           connect when both have made it
      Frame + Announced ─────────────────────────────>     the send is posted now: post the receive
      payload ══════════ process group ══════════════>     then the message counts as arrived

A receive is posted only on the sender's word, which it gives when it has its turn: one that is
posted for a dead sender spins on a GPU for ever, and ranks that send to each other and to third
ones would wait in a circle. In one turn several follow each other, each posted before the one
before it is over. Room for payloads there always is: a sender has few frames unanswered.
So on GPUs a sender that stops in a frame holds its receiver's turn, and who sends to that receiver
waits, with its own turn, until the receiver gives the stopped one up. A receiver that stops holds
its sender's turn; what waits for that is not late.

No global world: the rank that dialled hosts a store, its address travels over the stream. Each pair
has one thread that posts and waits; the endpoint's thread watches the deadline and aborts. An
overdue operation closes the pair, which is remade when its peer is connected again.
"""

import torch

from kv_transfer.messages import Announced, Message, PairOffer
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

MAX_PARCEL_BYTES = 256 << 20
MAX_PARCELS = 8  # announced and not there yet; no honest side has more


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
        self._staging = setting.staging
        self._pair = Pair(stream, setting, make_group)
        self._has_begun = False
        self._num_parcels = 0
        self._posted: dict[int, tuple[Message, torch.Tensor]] = {}

    @property
    def is_waiting(self) -> bool:
        return self._pair.is_waiting

    def send(self, message: Message) -> None:
        if (payload := message.payload) is None:
            self._stream.send(message)
            return
        if not self._has_begun and self._stream.is_dialled:
            self._has_begun = True
            self._pair.host()
        parcel, self._num_parcels = self._num_parcels, self._num_parcels + 1
        word = Message(message.body, announced=Announced(parcel, len(payload)))
        self._pair.do(Send(word, _as_tensor(payload)))

    def take_back(self, seq: int) -> None:
        """Nothing is lent: what was sent is a copy."""

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        match event:
            case PayloadCame(parcel=parcel):
                message, data = self._posted.pop(parcel)
                on_device = self.payloads is Payloads.ON_DEVICE
                return Message(message.body, data if on_device else data.numpy())
            case PairMet():
                return None
            case Arrived(message=Message(body=PairOffer() as offer)):
                self._join(offer)
                return None
            case Arrived(message=message):
                return self._on_message(message)

    def check(self, now_s: float) -> None:
        self._pair.check(now_s)

    def close(self) -> None:
        self._stream.close()
        self._pair.close()

    def _on_message(self, message: Message) -> Message | None:
        if message.payload is not None:
            raise LinkDownError("a payload inside a message on a link that moves them out of band")
        if (announced := message.announced) is None:
            return message
        parcel, num_bytes = announced.parcel, announced.num_bytes
        if not self._has_begun:
            raise LinkDownError("a payload is announced before the process group is made")
        is_odd = parcel in self._posted or len(self._posted) == MAX_PARCELS
        if is_odd or not 0 < num_bytes <= MAX_PARCEL_BYTES:
            raise LinkDownError(f"parcel {parcel} of {num_bytes} bytes announced")
        data = self._buffer(num_bytes)
        self._posted[parcel] = message, data
        self._pair.do(Receive(parcel, data))
        return None

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory for a payload. On a GPU it belongs to a stream of its own: memory of the stream on
        which the model runs may still be in use by a step. All links share it, so that what one
        that is closed leaves with the allocator serves the next.
        """
        if self.payloads is Payloads.IN_HOST_MEMORY:
            return torch.empty(num_bytes, dtype=torch.uint8)
        try:
            with torch.cuda.stream(self._staging):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise LinkDownError(f"no memory for a payload of {num_bytes} bytes: {error}") from error

    def _join(self, offer: PairOffer) -> None:
        if self._has_begun or self._stream.is_dialled:
            raise LinkDownError("the wrong side of a link offers to make its process group")
        self._has_begun = True
        self._pair.join(offer)


def _as_tensor(payload: Payload) -> torch.Tensor:
    assert not isinstance(payload, Lent | Borrowed), "nothing is lent here"
    if isinstance(payload, torch.Tensor):
        return payload
    return torch.from_numpy(payload if payload.flags.writeable else payload.copy())
