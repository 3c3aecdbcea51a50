"""Which part of whose KV goes where when a handoff's two nodes keep their caches differently.

Heads: each receiver rank gets each of its KV heads from exactly one sender rank. Where several
sender ranks hold the same head (TP > KV heads), the receivers that want it are dealt out evenly
over them.

Tokens: both sides cut their blocks into *pieces* of ``u`` tokens, the greatest common divisor of
the two block sizes, so that a piece lies inside one block on either side. Piece ``p`` holds the
tokens ``[p·u, (p+1)·u)``; the last piece of a prompt may be only partly filled.

    sender, block size 6     |  p0  |  p1  |  p2  ||  p3  | ...
    receiver, block size 4   |  p0  |  p1  ||  p2  |  p3  || ...        u = 2

Pure arithmetic; knows neither blocks' addresses nor how bytes move.
"""

from dataclasses import dataclass
from math import gcd

from pdserve.core.errors import HandshakeError
from pdserve.core.kv_layout import DTYPE_BYTES, KvLayout

SAME_MODEL = "serve the same model on both pools"
SAME_DTYPE = "set kv_cache.dtype (or model.dtype) alike on both pools"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """The heads that one sender rank sends to one receiver rank, counted within each rank."""

    sender_rank: int
    receiver_rank: int
    sender_heads: range
    receiver_heads: range


@dataclass(frozen=True, slots=True)
class PieceGrid:
    """How one side's block table is cut into pieces of ``unit`` tokens."""

    unit: int
    block_size: int

    @property
    def pieces_per_block(self) -> int:
        return self.block_size // self.unit

    def num_pieces(self, num_tokens: int) -> int:
        """Pieces that hold ``num_tokens`` tokens, the last one maybe partly filled."""
        return -(-num_tokens // self.unit)

    def locate(self, piece: int) -> tuple[int, int]:
        """Index into the block table, and token offset within that block, of a piece."""
        index, within = divmod(piece, self.pieces_per_block)
        return index, within * self.unit


def check_compatible(ours: KvLayout, theirs: KvLayout) -> None:
    """Raises HandshakeError, naming the field, where no resharding can bridge the difference."""
    for field, here, there, cure in (
        ("dtype", ours.dtype, theirs.dtype, SAME_DTYPE),
        ("num_layers", ours.num_layers, theirs.num_layers, SAME_MODEL),
        ("num_kv_heads", ours.num_kv_heads, theirs.num_kv_heads, SAME_MODEL),
        ("head_size", ours.head_size, theirs.head_size, SAME_MODEL),
    ):
        if here != there:
            raise HandshakeError(field, ours=here, theirs=there, cure=cure)


def exchange_unit(sender: KvLayout, receiver: KvLayout) -> int:
    """Tokens of a piece."""
    return gcd(sender.block_size, receiver.block_size)


def cell_bytes(layout: KvLayout, unit: int) -> int:
    """Bytes of one head of one piece, ``[L, 2, u, D]``: the smallest part to be sent alone."""
    return layout.num_layers * 2 * unit * layout.head_size * DTYPE_BYTES[layout.dtype]


def head_slices(sender: KvLayout, receiver: KvLayout) -> tuple[HeadSlice, ...]:
    """Each (sender rank, receiver rank) that exchange heads, once, by receiver rank."""
    return tuple(
        piece
        for receiver_rank in range(receiver.tp_size)
        for piece in _slices_for(sender, receiver, receiver_rank)
    )


def _slices_for(sender: KvLayout, receiver: KvLayout, receiver_rank: int) -> list[HeadSlice]:
    wanted = receiver.heads_of(receiver_rank)
    found: dict[int, list[int]] = {}  # sender rank -> the model's heads, ascending
    for head in wanted:
        found.setdefault(_source(sender, receiver, receiver_rank, head), []).append(head)
    slices = []
    for sender_rank, heads in found.items():
        first, count = heads[0], len(heads)
        theirs = first - sender.heads_of(sender_rank).start
        ours = first - wanted.start
        slices.append(
            HeadSlice(
                sender_rank=sender_rank,
                receiver_rank=receiver_rank,
                sender_heads=range(theirs, theirs + count),
                receiver_heads=range(ours, ours + count),
            )
        )
    return slices


def _source(sender: KvLayout, receiver: KvLayout, receiver_rank: int, head: int) -> int:
    """The sender rank that serves ``head`` to this receiver rank."""
    holders, wanters = _holders(sender, head), _holders(receiver, head)
    turn = receiver_rank - wanters.start
    return holders[turn * len(holders) // len(wanters)]


def _holders(layout: KvLayout, head: int) -> range:
    """The ranks that hold one of the model's KV heads."""
    if layout.tp_size <= layout.num_kv_heads:
        rank = head // layout.heads_per_rank
        return range(rank, rank + 1)
    copies = layout.tp_size // layout.num_kv_heads
    return range(head * copies, (head + 1) * copies)
