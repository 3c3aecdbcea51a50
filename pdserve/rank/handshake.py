"""The compatibility record of a pair of nodes: made once, compared field by field, turned into a
peer.

TP sizes and block sizes may differ (``kv_transfer/reshard.py`` bridges them); everything that
would make one node's KV cache mean something else on the other refuses the pair.
"""

from kv_transfer.commands import Peer
from pdserve.core.errors import HandshakeError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.node import NodeSpec
from pdserve.rank.ranks import Ranks
from pdserve.rpc.session import PROTOCOL_VERSION
from pdserve.rpc.v1 import session_pb2

_CURES = {
    "protocol_version": "run the same release of pdserve on both nodes",
    "model_fingerprint": "serve the same model files from both nodes",
    "dtype": "set model.dtype alike for both nodes",
    "kv_dtype": "set kv_cache.dtype alike for both nodes",
    "num_layers": "serve the same model from both nodes",
    "num_kv_heads": "serve the same model from both nodes",
    "head_size": "serve the same model from both nodes",
    "transport": "set kv_transfer.transport alike for both nodes",
}


def make_record(spec: NodeSpec, ranks: Ranks) -> session_pb2.CompatibilityRecord:
    """What this node tells the other one."""
    layout = ranks.layout
    return session_pb2.CompatibilityRecord(
        protocol_version=PROTOCOL_VERSION,
        node=spec.name,
        incarnation=spec.incarnation,
        role=spec.role,
        model_fingerprint=spec.model.fingerprint,
        dtype=spec.dtype,
        kv_dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        tp_size=layout.tp_size,
        transport=spec.transport,
        rank_addresses=ranks.addresses,
    )


def check_record(
    ours: session_pb2.CompatibilityRecord, theirs: session_pb2.CompatibilityRecord
) -> None:
    """Raise HandshakeError naming the first field in which the two can not work together."""
    for field, cure in _CURES.items():
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            raise HandshakeError(field, ours=here, theirs=there, cure=cure)


def peer_of(record: session_pb2.CompatibilityRecord) -> Peer:
    """The other node as KV endpoints see it."""
    layout = KvLayout(
        num_layers=record.num_layers,
        num_kv_heads=record.num_kv_heads,
        head_size=record.head_size,
        block_size=record.block_size,
        dtype=record.kv_dtype,
        tp_size=record.tp_size,
    )
    return Peer(
        peer_id=record.incarnation,
        layout=layout,
        transport=record.transport,
        addresses=tuple(record.rank_addresses),
    )
