"""One handoff on the sender's rank: what was pushed, and how it is cut into frames for each link.

A frame holds whole pieces, as many as ``frame_bytes`` allow; where one piece alone is larger, a
frame holds some of its heads. Pure bookkeeping.
"""

from dataclasses import dataclass

from kv_transfer.commands import PushTokens
from kv_transfer.frame_queue import LinkId
from kv_transfer.payload import Lent
from kv_transfer.pieces import check_blocks
from kv_transfer.reshard import PieceGrid
from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import BlockId


@dataclass(frozen=True, slots=True)
class FrameCutter:
    """Cuts runs of pieces into frames. ``cell_bytes`` are those of one head of one piece."""

    cell_bytes: int
    frame_bytes: int

    def cut(self, piece: int, head: int, *, stop: int, num_heads: int) -> tuple[range, range]:
        """Pieces and heads of the frame that begins at ``(piece, head)``; ``stop`` ends it."""
        cells = max(1, self.frame_bytes // self.cell_bytes)
        if cells >= num_heads:
            return range(piece, min(stop, piece + cells // num_heads)), range(num_heads)
        return range(piece, piece + 1), range(head, min(num_heads, head + cells))


@dataclass(slots=True)
class _Cursor:
    """How far one link is: the next frame begins at this piece and head."""

    num_heads: int
    piece: int
    head: int = 0


class Outgoing:
    """Owns the progress of one handoff; ``num_heads`` says how many heads each link carries.

    It begins with the first token of the ``first`` push. Raises TransferError if no piece begins
    there.
    """

    def __init__(
        self,
        first: PushTokens,
        num_heads: dict[LinkId, int],
        *,
        grid: PieceGrid,
        cutter: FrameCutter,
    ) -> None:
        self.handoff = first.handoff
        self.peer_id = first.peer_id
        self.unit = grid.unit
        self.blocks: tuple[BlockId, ...] = ()
        self.num_bytes_delivered = 0
        self._grid = grid
        self._cutter = cutter
        if first.start % grid.unit:
            raise TransferError(
                f"the first push starts at token {first.start}, not on a multiple of {grid.unit}"
            )
        self._num_tokens = first.start
        self._num_pieces = grid.num_pieces(first.start)
        self._cursors = {
            link: _Cursor(num, piece=self._num_pieces) for link, num in num_heads.items()
        }
        self._is_complete = False
        self._num_bytes_due = 0

    def push(self, push: PushTokens, *, num_blocks: int) -> dict[LinkId, int]:
        """More tokens are computed. Returns the bytes that each link has to send for them.

        ``num_blocks`` is the size of the cache. Raises TransferError if the push does not follow
        the one before, or names blocks that the cache does not have.
        """
        self._check(push, num_blocks)
        self.blocks = push.blocks
        self._num_tokens, self._is_complete = push.stop, push.last
        before, self._num_pieces = self._num_pieces, self._grid.num_pieces(push.stop)
        cells = self._num_pieces - before
        fresh = {
            link: cells * cursor.num_heads * self._cutter.cell_bytes
            for link, cursor in self._cursors.items()
        }
        self._num_bytes_due += sum(fresh.values())
        return {link: num_bytes for link, num_bytes in fresh.items() if num_bytes}

    def next_frame(self, link: LinkId) -> tuple[range, range]:
        """Pieces and heads (of those the link carries) of the link's next frame."""
        cursor = self._cursors[link]
        pieces, heads = self._cutter.cut(
            cursor.piece, cursor.head, stop=self._num_pieces, num_heads=cursor.num_heads
        )
        assert pieces, "nothing is left to send on this link"
        cursor.head = heads.stop % cursor.num_heads
        cursor.piece = pieces.stop if not cursor.head else pieces.start
        return pieces, heads

    def lend(self, pieces: range, heads: range) -> Lent:
        """Where the pieces of ``heads`` of this rank are."""
        per_block = self._grid.pieces_per_block
        first, last = pieces.start // per_block, -(-pieces.stop // per_block)
        return Lent(
            blocks=self.blocks[first:last],
            first_piece=pieces.start % per_block,
            first_head=heads.start,
            num_bytes=len(pieces) * len(heads) * self._cutter.cell_bytes,
        )

    def delivered(self, num_bytes: int) -> None:
        """A frame is in the receiver's blocks."""
        self.num_bytes_delivered += num_bytes

    @property
    def is_done(self) -> bool:
        return self._is_complete and self.num_bytes_delivered == self._num_bytes_due

    def _check(self, push: PushTokens, num_blocks: int) -> None:
        if self._is_complete or push.start != self._num_tokens or push.stop < push.start:
            raise TransferError(
                f"push of tokens [{push.start}, {push.stop}) does not follow {self._num_tokens}"
            )
        if not push.last and push.stop % self._grid.unit:
            raise TransferError(
                f"push ends at token {push.stop}, not on a multiple of {self._grid.unit}"
            )
        needed = -(-push.stop // self._grid.block_size)
        if len(push.blocks) < needed:
            raise TransferError(f"push to token {push.stop} names {len(push.blocks)} blocks")
        check_blocks(push.blocks[:needed], num_blocks)
