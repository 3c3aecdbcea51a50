"""What is compared before two processes work together."""

import pytest

from kv_transfer.commands import Peer
from pdserve.core.errors import HandshakeError
from pdserve.core.kv_layout import KvLayout
from pdserve.rank.handshake import check_record
from pdserve.rpc.v1 import session_pb2

OURS = session_pb2.CompatibilityRecord(
    protocol_version=1,
    node="decode-0",
    incarnation="decode-0#1",
    role="decode",
    model_fingerprint="f00d",
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
    num_layers=2,
    num_kv_heads=4,
    head_size=8,
    tp_size=1,
    transport="grpc",
    rank_addresses=["127.0.0.1:1"],
)


def theirs(**fields) -> session_pb2.CompatibilityRecord:
    record = session_pb2.CompatibilityRecord()
    record.CopyFrom(OURS)
    record.MergeFrom(
        session_pb2.CompatibilityRecord(node="prefill-0", incarnation="prefill-0#7", role="prefill")
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_a_node_that_fits_becomes_a_peer_by_its_incarnation():
    record = theirs(block_size=6, tp_size=2)
    record.rank_addresses.append("127.0.0.1:2")
    assert check_record(OURS, record) == Peer(
        peer_id="prefill-0#7",
        layout=KvLayout(
            num_layers=2, num_kv_heads=4, head_size=8, block_size=6, dtype="float32", tp_size=2
        ),
        transport="grpc",
        addresses=("127.0.0.1:1", "127.0.0.1:2"),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", 2),
        ("model_fingerprint", "beef"),
        ("dtype", "bfloat16"),
        ("kv_dtype", "bfloat16"),
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_size", 16),
        ("transport", "gloo"),
        ("role", "decode"),
        ("block_size", 0),
        ("tp_size", 0),
        ("tp_size", 2),  # with one address
    ],
)
def test_a_mismatch_is_refused_with_the_field_both_values_and_the_cure(field, value):
    record = theirs(**{field: value})
    with pytest.raises(HandshakeError) as raised:
        check_record(OURS, record)
    assert raised.value.field == field
    message = str(raised.value)
    assert f"here {getattr(OURS, field)!r}, there {value!r}; " in message


def test_ranks_that_can_not_share_the_heads_are_refused():
    record = theirs(tp_size=3)
    record.rank_addresses.extend(["127.0.0.1:2", "127.0.0.1:3"])
    with pytest.raises(HandshakeError, match="cannot share 4 KV heads"):
        check_record(OURS, record)
