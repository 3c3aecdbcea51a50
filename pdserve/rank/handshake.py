"""What has to fit before two processes work together: told once, compared field by field.

TP sizes and block sizes may differ (``kv_transfer/reshard.py`` bridges them); everything that
would make one node's KV cache mean something else on the other refuses the pair.
"""

from kv_transfer.commands import Peer
from pdserve.core.errors import ConfigError, HandshakeError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.node import NodeSpec
from pdserve.rank.ranks import Ranks
from pdserve.rpc.session import PROTOCOL_VERSION
from pdserve.rpc.v1 import session_pb2

_SAME_RELEASE = "run the same release of pdserve everywhere"
_SAME_MODEL = "serve the same model files from all nodes"
_CURES = {
    "protocol_version": _SAME_RELEASE,
    "model_fingerprint": _SAME_MODEL,
    "dtype": "set model.dtype alike for both nodes",
    "kv_dtype": "set kv_cache.dtype alike for both nodes",
    "num_layers": _SAME_MODEL,
    "num_kv_heads": _SAME_MODEL,
    "head_size": _SAME_MODEL,
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
) -> Peer:
    """The other node as KV endpoints see it.

    Raises HandshakeError naming the first field in which the two can not work together.
    """
    for field, cure in _CURES.items():
        if getattr(ours, field) != getattr(theirs, field):
            raise _misfit(field, ours, theirs, cure)
    if theirs.role == ours.role:
        raise _misfit("role", ours, theirs, "pair a prefill node with a decode node")
    if theirs.block_size < 1:
        raise _misfit("block_size", ours, theirs, _SAME_RELEASE)
    if theirs.tp_size < 1 or len(theirs.rank_addresses) != theirs.tp_size:
        raise _misfit("tp_size", ours, theirs, _SAME_RELEASE)
    return _peer_of(ours, theirs)


def check_hello(spec: NodeSpec, hello: session_pb2.RouterHello) -> None:
    """Raise HandshakeError if a router does not fit this node."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise HandshakeError(
            "protocol_version",
            ours=PROTOCOL_VERSION,
            theirs=hello.protocol_version,
            cure=_SAME_RELEASE,
        )
    if hello.model_fingerprint != spec.model.fingerprint:
        raise HandshakeError(
            "model_fingerprint",
            ours=spec.model.fingerprint,
            theirs=hello.model_fingerprint,
            cure=_SAME_MODEL,
        )


def _peer_of(
    ours: session_pb2.CompatibilityRecord, theirs: session_pb2.CompatibilityRecord
) -> Peer:
    try:
        layout = KvLayout(
            num_layers=theirs.num_layers,
            num_kv_heads=theirs.num_kv_heads,
            head_size=theirs.head_size,
            block_size=theirs.block_size,
            dtype=theirs.kv_dtype,
            tp_size=theirs.tp_size,
        )
    except ConfigError as error:
        raise _misfit("tp_size", ours, theirs, str(error)) from error
    return Peer(
        peer_id=theirs.incarnation,
        layout=layout,
        transport=theirs.transport,
        addresses=tuple(theirs.rank_addresses),
    )


def _misfit(
    field: str,
    ours: session_pb2.CompatibilityRecord,
    theirs: session_pb2.CompatibilityRecord,
    cure: str,
) -> HandshakeError:
    return HandshakeError(
        field, ours=getattr(ours, field), theirs=getattr(theirs, field), cure=cure
    )
