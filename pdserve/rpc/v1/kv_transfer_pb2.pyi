from pdserve.rpc.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkMessage(_message.Message):
    __slots__ = ("hello", "refused", "warm", "frame", "delivered", "rejected", "heartbeat", "pair_offer", "cache_offer", "lent", "announced", "payload")
    class Layout(_message.Message):
        __slots__ = ("num_layers", "num_kv_heads", "head_size", "block_size", "dtype", "tp_size")
        NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
        NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
        HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
        BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        TP_SIZE_FIELD_NUMBER: _ClassVar[int]
        num_layers: int
        num_kv_heads: int
        head_size: int
        block_size: int
        dtype: str
        tp_size: int
        def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., tp_size: _Optional[int] = ...) -> None: ...
    class Hello(_message.Message):
        __slots__ = ("version", "peer_id", "rank", "layout", "transport")
        VERSION_FIELD_NUMBER: _ClassVar[int]
        PEER_ID_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        LAYOUT_FIELD_NUMBER: _ClassVar[int]
        TRANSPORT_FIELD_NUMBER: _ClassVar[int]
        version: int
        peer_id: str
        rank: int
        layout: LinkMessage.Layout
        transport: str
        def __init__(self, version: _Optional[int] = ..., peer_id: _Optional[str] = ..., rank: _Optional[int] = ..., layout: _Optional[_Union[LinkMessage.Layout, _Mapping]] = ..., transport: _Optional[str] = ...) -> None: ...
    class Refused(_message.Message):
        __slots__ = ("kind", "message")
        KIND_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        kind: str
        message: str
        def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
    class Warm(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Frame(_message.Message):
        __slots__ = ("seq", "handoff", "first_piece", "num_pieces", "first_head", "num_heads", "checksum")
        SEQ_FIELD_NUMBER: _ClassVar[int]
        HANDOFF_FIELD_NUMBER: _ClassVar[int]
        FIRST_PIECE_FIELD_NUMBER: _ClassVar[int]
        NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
        FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
        NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
        CHECKSUM_FIELD_NUMBER: _ClassVar[int]
        seq: int
        handoff: _session_pb2.HandoffKey
        first_piece: int
        num_pieces: int
        first_head: int
        num_heads: int
        checksum: int
        def __init__(self, seq: _Optional[int] = ..., handoff: _Optional[_Union[_session_pb2.HandoffKey, _Mapping]] = ..., first_piece: _Optional[int] = ..., num_pieces: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...
    class Delivered(_message.Message):
        __slots__ = ("seq",)
        SEQ_FIELD_NUMBER: _ClassVar[int]
        seq: int
        def __init__(self, seq: _Optional[int] = ...) -> None: ...
    class Rejected(_message.Message):
        __slots__ = ("seq", "kind", "message")
        SEQ_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        seq: int
        kind: str
        message: str
        def __init__(self, seq: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
    class Heartbeat(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class PairOffer(_message.Message):
        __slots__ = ("host", "port")
        HOST_FIELD_NUMBER: _ClassVar[int]
        PORT_FIELD_NUMBER: _ClassVar[int]
        host: str
        port: int
        def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...
    class CacheOffer(_message.Message):
        __slots__ = ("memory", "offset", "num_blocks", "num_heads", "block_size", "block_stride_bytes", "leases", "line")
        MEMORY_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
        BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
        LEASES_FIELD_NUMBER: _ClassVar[int]
        LINE_FIELD_NUMBER: _ClassVar[int]
        memory: bytes
        offset: int
        num_blocks: int
        num_heads: int
        block_size: int
        block_stride_bytes: int
        leases: str
        line: str
        def __init__(self, memory: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_heads: _Optional[int] = ..., block_size: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., leases: _Optional[str] = ..., line: _Optional[str] = ...) -> None: ...
    class Lent(_message.Message):
        __slots__ = ("blocks", "first_piece", "first_head", "num_bytes")
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        FIRST_PIECE_FIELD_NUMBER: _ClassVar[int]
        FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
        NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
        blocks: _containers.RepeatedScalarFieldContainer[int]
        first_piece: int
        first_head: int
        num_bytes: int
        def __init__(self, blocks: _Optional[_Iterable[int]] = ..., first_piece: _Optional[int] = ..., first_head: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...
    class Announced(_message.Message):
        __slots__ = ("parcel", "num_bytes")
        PARCEL_FIELD_NUMBER: _ClassVar[int]
        NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
        parcel: int
        num_bytes: int
        def __init__(self, parcel: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PAIR_OFFER_FIELD_NUMBER: _ClassVar[int]
    CACHE_OFFER_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    hello: LinkMessage.Hello
    refused: LinkMessage.Refused
    warm: LinkMessage.Warm
    frame: LinkMessage.Frame
    delivered: LinkMessage.Delivered
    rejected: LinkMessage.Rejected
    heartbeat: LinkMessage.Heartbeat
    pair_offer: LinkMessage.PairOffer
    cache_offer: LinkMessage.CacheOffer
    lent: LinkMessage.Lent
    announced: LinkMessage.Announced
    payload: bytes
    def __init__(self, hello: _Optional[_Union[LinkMessage.Hello, _Mapping]] = ..., refused: _Optional[_Union[LinkMessage.Refused, _Mapping]] = ..., warm: _Optional[_Union[LinkMessage.Warm, _Mapping]] = ..., frame: _Optional[_Union[LinkMessage.Frame, _Mapping]] = ..., delivered: _Optional[_Union[LinkMessage.Delivered, _Mapping]] = ..., rejected: _Optional[_Union[LinkMessage.Rejected, _Mapping]] = ..., heartbeat: _Optional[_Union[LinkMessage.Heartbeat, _Mapping]] = ..., pair_offer: _Optional[_Union[LinkMessage.PairOffer, _Mapping]] = ..., cache_offer: _Optional[_Union[LinkMessage.CacheOffer, _Mapping]] = ..., lent: _Optional[_Union[LinkMessage.Lent, _Mapping]] = ..., announced: _Optional[_Union[LinkMessage.Announced, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...
