"""Link messages on the wire: round trips, other implementations' bytes, and garbage."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from kv_transfer.payload import Lent
from kv_transfer.transports.codec import decode, encode
from pdserve.core.errors import LinkDownError
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.core.request import HandoffId
from pdserve.rpc.v1.kv_transfer_pb2 import LinkMessage
from tests.fuzzing import inputs

LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=6, head_size=4, block_size=4, dtype="bfloat16", tp_size=3
)
small = st.integers(0, 2**31 - 1)
big = st.integers(0, 2**63)
texts = st.text(max_size=20)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    first, head = draw(small), draw(st.integers(0, 100))
    return Frame(
        seq=draw(big),
        handoff=HandoffId(draw(texts), draw(small), draw(small)),
        pieces=range(first, first + draw(st.integers(0, 99))),
        heads=range(head, head + draw(st.integers(0, 99))),
        checksum=draw(st.none() | st.integers(0, 2**32 - 1)),
    )


bodies: st.SearchStrategy[Body] = st.one_of(
    frames(),
    st.builds(
        Hello, version=small, peer_id=texts, rank=small, layout=st.just(LAYOUT), transport=texts
    ),
    st.builds(Refused, kind=texts, message=texts),
    st.just(Warm()),
    st.builds(Delivered, big),
    st.builds(Rejected, seq=big, kind=texts, message=texts),
    st.just(Heartbeat()),
    st.builds(PairOffer, texts, st.integers(0, 65535)),
    st.builds(
        CacheOffer,
        memory=st.binary(max_size=64),
        offset=big,
        num_blocks=small,
        num_heads=small,
        block_size=small,
        block_stride_bytes=big,
        leases=texts,
        line=texts,
    ),
)
payloads = st.none() | st.binary(max_size=300)


def message(body: Body, payload: bytes | None, announced: Announced | None = None) -> Message:
    data = None if payload is None else np.frombuffer(payload, np.uint8)
    return Message(body, data, announced)


def payload_of(message: Message) -> bytes | None:
    if message.payload is None:
        return None
    assert isinstance(message.payload, np.ndarray)
    return message.payload.tobytes()


@given(body=bodies, payload=payloads, announced=st.none() | st.builds(Announced, big, big))
def test_what_is_written_is_read_again(
    body: Body, payload: bytes | None, announced: Announced | None
) -> None:
    read = decode(encode(message(body, payload, announced)))
    assert read.body == body
    assert read.announced == announced
    assert payload_of(read) == payload


@given(body=bodies, payload=st.binary(min_size=1, max_size=300))
def test_any_protobuf_implementation_reads_and_writes_the_same_message(
    body: Body, payload: bytes
) -> None:
    wire = LinkMessage.FromString(encode(message(body, payload)))
    assert wire.payload == payload
    read = decode(wire.SerializeToString())
    assert read.body == body
    assert payload_of(read) == payload


@given(blocks=st.lists(small.map(BlockId), max_size=20), first=small, head=small, num_bytes=big)
def test_what_is_lent_is_read_again(
    blocks: list[BlockId], first: int, head: int, num_bytes: int
) -> None:
    lent = Lent(blocks=tuple(blocks), first_piece=first, first_head=head, num_bytes=num_bytes)
    assert decode(encode(Message(Warm(), lent))).payload == lent


def test_the_payload_may_stand_anywhere_and_unknown_fields_are_skipped() -> None:
    raw = encode(message(Delivered(7), b"abc"))
    head, tail = raw[: -len(b"\x7a\x03abc")], raw[-len(b"\x7a\x03abc") :]
    unknown = b"\xa0\x06\x05" + b"\xa5\x06\x01\x02\x03\x04"  # field 100: a varint, then fixed32
    read = decode(unknown + tail + head)
    assert read.body == Delivered(7)
    assert payload_of(read) == b"abc"


def test_a_payload_is_a_view_of_what_arrived_not_a_copy() -> None:
    raw = encode(message(Warm(), bytes(1000)))
    payload = decode(raw).payload
    assert isinstance(payload, np.ndarray)
    assert np.shares_memory(payload, np.frombuffer(raw, np.uint8))


@given(raw=st.binary(max_size=200))
@inputs(300)
@pytest.mark.fuzz
def test_garbage_is_a_message_or_a_named_error(raw: bytes) -> None:
    with suppress(LinkDownError):
        decode(raw)


@given(body=bodies, payload=payloads, data=st.data())
@inputs(300)
@pytest.mark.fuzz
def test_a_damaged_message_is_a_message_or_a_named_error(
    body: Body, payload: bytes | None, data: st.DataObject
) -> None:
    raw = bytearray(encode(message(body, payload)))
    for _ in range(data.draw(st.integers(1, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        with suppress(LinkDownError):
            decode(damaged)


@pytest.mark.parametrize(
    "raw", [b"", b"\x7a\x05ab", b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"]
)
def test_an_empty_or_cut_off_message_is_malformed(raw: bytes) -> None:
    with pytest.raises(LinkDownError, match="malformed message"):
        decode(raw)
