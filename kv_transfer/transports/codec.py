"""Link messages to and from bytes: the protobuf message ``LinkMessage`` of kv_transfer.proto.

Payloads are not copied through protobuf. It is its last field, so writing appends tag, length and
bytes to the serialised rest, and reading takes the field out as a view before the rest is parsed.
Any protobuf implementation reads what is written here.
"""

import numpy as np
from google.protobuf.message import DecodeError

from kv_transfer.messages import (
    Announced,
    Body,
    CacheOffer,
    Delivered,
    Frame,
    Heartbeat,
    Hello,
    Message,
    PairOffer,
    Refused,
    Rejected,
    Warm,
)
from kv_transfer.payload import Bytes, Lent
from pdserve.core.errors import ConfigError, LinkDownError
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.rpc import convert
from pdserve.rpc.v1.kv_transfer_pb2 import LinkMessage

PAYLOAD_TAG = LinkMessage.PAYLOAD_FIELD_NUMBER << 3 | 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def encode(message: Message) -> bytes:
    """The bytes of a message whose payload, if any, is in host memory."""
    wire = LinkMessage()
    _fill(wire, message.body)
    if (announced := message.announced) is not None:
        wire.announced.parcel = announced.parcel
        wire.announced.num_bytes = announced.num_bytes
    payload = message.payload
    if isinstance(payload, Lent):
        wire.lent.CopyFrom(_lent_to_wire(payload))
    head = wire.SerializeToString()
    if payload is None or isinstance(payload, Lent):
        return head
    assert isinstance(payload, np.ndarray), "only arrays in host memory travel inside"
    return b"".join((head, bytes([PAYLOAD_TAG]), _write_varint(payload.nbytes), payload.data))


def decode(raw: bytes) -> Message:
    """The message; its payload is a view of ``raw``. Raises LinkDownError if malformed."""
    try:
        rest, payload = _split(raw)
        wire = LinkMessage.FromString(rest)
        announced = None
        if wire.HasField("announced"):
            announced = Announced(wire.announced.parcel, wire.announced.num_bytes)
        if wire.HasField("lent"):
            return Message(_body(wire), _lent_from_wire(wire.lent), announced)
        return Message(_body(wire), payload, announced)
    except (DecodeError, IndexError, ValueError, ConfigError, UnicodeDecodeError) as error:
        raise LinkDownError(f"malformed message: {error!r}") from error


def _fill(wire: LinkMessage, body: Body) -> None:
    match body:
        case Frame():
            wire.frame.CopyFrom(_frame_to_wire(body))
        case Delivered(seq=seq):
            wire.delivered.seq = seq
        case Rejected(seq=seq, kind=kind, message=message):
            wire.rejected.CopyFrom(LinkMessage.Rejected(seq=seq, kind=kind, message=message))
        case Heartbeat():
            wire.heartbeat.SetInParent()
        case Hello():
            wire.hello.CopyFrom(_hello_to_wire(body))
        case Refused(kind=kind, message=message):
            wire.refused.CopyFrom(LinkMessage.Refused(kind=kind, message=message))
        case Warm():
            wire.warm.SetInParent()
        case CacheOffer():
            wire.cache_offer.CopyFrom(_offer_to_wire(body))
        case PairOffer(host=host, port=port):
            wire.pair_offer.CopyFrom(LinkMessage.PairOffer(host=host, port=port))


def _body(wire: LinkMessage) -> Body:
    match wire.WhichOneof("body"):
        case "frame":
            return _frame_from_wire(wire.frame)
        case "delivered":
            return Delivered(wire.delivered.seq)
        case "rejected":
            rejected = wire.rejected
            return Rejected(seq=rejected.seq, kind=rejected.kind, message=rejected.message)
        case "heartbeat":
            return Heartbeat()
        case "hello":
            return _hello_from_wire(wire.hello)
        case "refused":
            return Refused(kind=wire.refused.kind, message=wire.refused.message)
        case "warm":
            return Warm()
        case other:
            return _out_of_band_body(wire, other)


def _out_of_band_body(wire: LinkMessage, name: str | None) -> Body:
    match name:
        case "cache_offer":
            return _offer_from_wire(wire.cache_offer)
        case "pair_offer":
            return PairOffer(wire.pair_offer.host, wire.pair_offer.port)
    raise ValueError("no body that this release knows")


def _frame_to_wire(frame: Frame) -> LinkMessage.Frame:
    return LinkMessage.Frame(
        seq=frame.seq,
        handoff=convert.handoff_to_proto(frame.handoff),
        first_piece=frame.pieces.start,
        num_pieces=len(frame.pieces),
        first_head=frame.heads.start,
        num_heads=len(frame.heads),
        checksum=frame.checksum,
    )


def _frame_from_wire(frame: LinkMessage.Frame) -> Frame:
    return Frame(
        seq=frame.seq,
        handoff=convert.handoff_from_proto(frame.handoff),
        pieces=range(frame.first_piece, frame.first_piece + frame.num_pieces),
        heads=range(frame.first_head, frame.first_head + frame.num_heads),
        checksum=frame.checksum if frame.HasField("checksum") else None,
    )


def _offer_to_wire(offer: CacheOffer) -> LinkMessage.CacheOffer:
    return LinkMessage.CacheOffer(
        memory=offer.memory,
        offset=offer.offset,
        num_blocks=offer.num_blocks,
        num_heads=offer.num_heads,
        block_size=offer.block_size,
        block_stride_bytes=offer.block_stride_bytes,
        leases=offer.leases,
        line=offer.line,
    )


def _offer_from_wire(offer: LinkMessage.CacheOffer) -> CacheOffer:
    return CacheOffer(
        memory=offer.memory,
        offset=offer.offset,
        num_blocks=offer.num_blocks,
        num_heads=offer.num_heads,
        block_size=offer.block_size,
        block_stride_bytes=offer.block_stride_bytes,
        leases=offer.leases,
        line=offer.line,
    )


def _lent_to_wire(lent: Lent) -> LinkMessage.Lent:
    return LinkMessage.Lent(
        blocks=lent.blocks,
        first_piece=lent.first_piece,
        first_head=lent.first_head,
        num_bytes=lent.num_bytes,
    )


def _lent_from_wire(lent: LinkMessage.Lent) -> Lent:
    return Lent(
        blocks=tuple(map(BlockId, lent.blocks)),
        first_piece=lent.first_piece,
        first_head=lent.first_head,
        num_bytes=lent.num_bytes,
    )


def _hello_to_wire(hello: Hello) -> LinkMessage.Hello:
    return LinkMessage.Hello(
        version=hello.version,
        peer_id=hello.peer_id,
        rank=hello.rank,
        layout=_layout_to_wire(hello.layout),
        transport=hello.transport,
    )


def _hello_from_wire(hello: LinkMessage.Hello) -> Hello:
    return Hello(
        version=hello.version,
        peer_id=hello.peer_id,
        rank=hello.rank,
        layout=_layout_from_wire(hello.layout),
        transport=hello.transport,
    )


def _layout_to_wire(layout: KvLayout) -> LinkMessage.Layout:
    return LinkMessage.Layout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        block_size=layout.block_size,
        dtype=layout.dtype,
        tp_size=layout.tp_size,
    )


def _layout_from_wire(layout: LinkMessage.Layout) -> KvLayout:
    if not (layout.tp_size and layout.num_kv_heads):
        raise ValueError("a layout without ranks or heads")
    return KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        block_size=layout.block_size,
        dtype=layout.dtype,
        tp_size=layout.tp_size,
    )


def _split(raw: bytes) -> tuple[bytes, Bytes | None]:
    """The message without its payload field, and the payload as a read-only view."""
    at = 0
    while at < len(raw):
        start = at
        tag, at = _read_varint(raw, at)
        stop = _skip(raw, at, tag & 7)
        if tag == PAYLOAD_TAG:
            length, at = _read_varint(raw, at)
            payload = np.frombuffer(raw, np.uint8, length, at)
            return raw[:start] + raw[stop:], payload
        at = stop
    return raw, None


def _skip(raw: bytes, at: int, kind: int) -> int:
    """Where the field of this wire type that begins at ``at`` ends."""
    if kind == _LENGTH:
        length, at = _read_varint(raw, at)
        at += length
    elif kind == _VARINT:
        _, at = _read_varint(raw, at)
    elif kind in (_FIXED32, _FIXED64):
        at += 4 if kind == _FIXED32 else 8
    else:
        raise ValueError(f"wire type {kind}")
    if at > len(raw):
        raise ValueError("a field reaches beyond the end")
    return at


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the top bit says that more follows
            return value, at
    raise ValueError("a number of more than 64 bits")


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
