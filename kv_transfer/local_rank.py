"""This rank as sender and receiver of its endpoint need it: who it is, its cache, its ways."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from kv_transfer.commands import KvEvent, Peer
from kv_transfer.frames import Frames
from kv_transfer.messages import Hello
from kv_transfer.pieces import Pieces
from kv_transfer.transports.transport import LinkSetting, Wire
from pdserve.core.clock import Clock
from pdserve.core.errors import HandshakeError
from pdserve.core.kv_layout import KvLayout

LINK_VERSION = 2
SAME_FRONT = "the front told something else; connect the nodes again"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """What does not change while the node is one incarnation. ``events`` go to the front."""

    peer_id: str
    rank: int
    layout: KvLayout
    pieces: Pieces
    frames: Callable[[str], Frames]  # by transport
    timeout_s: float
    clock: Clock
    wire: Wire
    links: LinkSetting
    events: SimpleQueue[KvEvent]

    @property
    def heartbeat_s(self) -> float:
        return self.timeout_s / 4

    @property
    def patience_s(self) -> float:
        """For what the other side's front must do first; ends before the sender's deadline."""
        return self.timeout_s / 2

    def hello(self, transport: str) -> Hello:
        return Hello(
            version=LINK_VERSION,
            peer_id=self.peer_id,
            rank=self.rank,
            layout=self.layout,
            transport=transport,
        )


def check_hello(peer: Peer, theirs: Hello) -> None:
    """Raises HandshakeError, by field, if the speaker is not the peer that the front described."""
    for field, here, there, cure in (
        ("version", LINK_VERSION, theirs.version, "run the same release of pdserve on both nodes"),
        ("peer_id", peer.peer_id, theirs.peer_id, "the address belongs to another node by now"),
        (
            "transport",
            peer.transport,
            theirs.transport,
            "set kv_transfer.transport alike on both nodes",
        ),
        ("tp_size", peer.layout.tp_size, theirs.layout.tp_size, SAME_FRONT),
        ("block_size", peer.layout.block_size, theirs.layout.block_size, SAME_FRONT),
        ("dtype", peer.layout.dtype, theirs.layout.dtype, SAME_FRONT),
        ("num_layers", peer.layout.num_layers, theirs.layout.num_layers, SAME_FRONT),
        ("num_kv_heads", peer.layout.num_kv_heads, theirs.layout.num_kv_heads, SAME_FRONT),
        ("head_size", peer.layout.head_size, theirs.layout.head_size, SAME_FRONT),
    ):
        if here != there:
            raise HandshakeError(field, ours=here, theirs=there, cure=cure)


def check_rank(expected: int, theirs: Hello) -> None:
    """Raises HandshakeError if another rank than expected speaks."""
    if theirs.rank != expected:
        raise HandshakeError("rank", ours=expected, theirs=theirs.rank, cure=SAME_FRONT)
