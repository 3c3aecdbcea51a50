"""What a front tells its ranks' KV endpoints, and what they tell back: plain data, no I/O.

The sender side names token ranges of a handoff, never blocks of the other node; each side knows its
own block table, so a late or wrong message can not write into blocks that are not its own. A *peer*
is the other node's incarnation: a node that was made anew is another peer.

    front of P ── ConnectPeer, ClosePeer, PushTokens, CancelSend ──> sender ranks
    front of D ── AcceptPeer, ClosePeer, ExpectHandoff, CancelReceive ──> receiver ranks
    front of either ── TakeName ──> its ranks, which answer NameTaken
    ranks of either ── EndpointFailed ──> their process, which ends by name
    sender ranks ── PeerConnected, PeerLost,
                    HandoffSent, HandoffFailed, SendDrained ──> front of P
    receiver ranks ── PeerConnected, PeerLost,
                      HandoffReceived, HandoffFailed, ReceiveDrained ──> front of D

Every rank of a node gets every command and answers for itself; a rank that has nothing to send or
to receive for a handoff (its heads come from a replica) answers at once all the same, so a front
always waits for all its ranks.
"""

from dataclasses import dataclass

from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.core.request import HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other node as KV endpoints see it. ``addresses[r]``: ``host:port`` of rank r."""

    peer_id: str
    layout: KvLayout
    transport: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectPeer:
    """Sender side: make links to the receiver ranks that reshard names, warmed both ways."""

    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptPeer:
    """Receiver side: links from this peer's ranks are welcome."""

    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePeer:
    """Either side: drop all links with this peer; its handoffs fail (HandoffFailed each)."""

    peer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectHandoff:
    """Receiver side: KV of tokens [start, num_tokens) will come from ``peer_id`` into ``blocks``.

    ``blocks`` is the sequence's block table from token 0 on. ``start`` is a multiple of the block
    size: the blocks before it hold their KV already and are not written.
    """

    handoff: HandoffId
    peer_id: str
    start: int
    num_tokens: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTokens:
    """Sender side: KV of tokens [start, stop) is computed; send it.

    ``blocks`` is the sequence's block table up to ``stop`` or longer. Ranges of one handoff follow
    each other without gaps from where the receiver wants the first; they begin, and all but the
    last end, on a multiple of the exchange unit of the pair (the greatest common divisor of both
    block sizes); ``last`` marks the end of the handoff.
    """

    handoff: HandoffId
    peer_id: str
    start: int
    stop: int
    blocks: tuple[BlockId, ...]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelSend:
    """Sender side: send nothing more; answer SendDrained once no block is being read."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelReceive:
    """Receiver side: drop what still comes; ReceiveDrained once no block is being written."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeName:
    """Either side: be another incarnation from now on, which knows no peer and no handoff.

    All that was under way ends. Answered by NameTaken, after the last event of the old one.
    """

    peer_id: str


KvCommand = (
    ConnectPeer
    | AcceptPeer
    | ClosePeer
    | ExpectHandoff
    | PushTokens
    | CancelSend
    | CancelReceive
    | TakeName
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """All links of this rank with the peer are up and warm."""

    peer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """A link with the peer broke or could not be made; all are closed.

    Reconnecting is the front's decision.
    """

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSent:
    """All pushes of the handoff up to ``last`` were delivered into the receivers' blocks."""

    handoff: HandoffId
    num_bytes: int  # payload bytes that this rank sent


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReceived:
    """All KV of the handoff that this rank needs is in its blocks and may be read."""

    handoff: HandoffId
    num_bytes: int  # payload bytes that this rank received


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailed:
    """The handoff can not be finished on this rank. ``kind`` is ``PdserveError.kind`` of the error.

    Blocks may still be in use: the front cancels and waits for the drain before it frees them.
    """

    handoff: HandoffId
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrained:
    """No block of the handoff is read any more and none will be."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveDrained:
    """No block of the handoff is written any more and none will be."""

    handoff: HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTaken:
    """This rank is another incarnation's. Nothing of the one before it is told any more."""

    peer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFailed:
    """The last event of an endpoint that can not say any more which blocks are drained."""

    reason: str


KvEvent = (
    PeerConnected
    | PeerLost
    | HandoffSent
    | HandoffReceived
    | HandoffFailed
    | SendDrained
    | ReceiveDrained
    | NameTaken
    | EndpointFailed
)
