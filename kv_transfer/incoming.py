"""One handoff on the receiver's rank: what is expected from which sender rank, what has come.

A *cell* is one head of one piece. Every cell of the prompt, from the first that is wanted on, comes
exactly once, from the sender rank that reshard names. Pure bookkeeping.
"""

import numpy as np

from kv_transfer.commands import ExpectHandoff
from kv_transfer.messages import Frame, checksum
from kv_transfer.payload import Payload
from kv_transfer.pieces import check_blocks
from kv_transfer.reshard import HeadSlice, PieceGrid
from pdserve.core.errors import ChecksumError, TransferError


class Incoming:
    """Owns which cells have come.

    Raises TransferError if the blocks can not hold the prompt, or if it can not begin at ``start``.
    """

    def __init__(
        self,
        expected: ExpectHandoff,
        slices: dict[int, HeadSlice],
        *,
        grid: PieceGrid,
        cell_bytes: int,
        num_blocks: int,
    ) -> None:
        needed = -(-expected.num_tokens // grid.block_size)
        if len(expected.blocks) < needed:
            raise TransferError(
                f"{expected.num_tokens} tokens do not fit into {len(expected.blocks)} blocks"
            )
        check_blocks(expected.blocks[:needed], num_blocks)
        if expected.start % grid.unit or not 0 <= expected.start <= expected.num_tokens:
            raise TransferError(
                f"tokens from {expected.start} on are expected of {expected.num_tokens}, "
                f"which is no multiple of {grid.unit} within them"
            )
        self.handoff = expected.handoff
        self.peer_id = expected.peer_id
        self.blocks = expected.blocks
        self.unit = grid.unit
        self.num_bytes = 0
        self._cell_bytes = cell_bytes
        self._slices = slices
        self._pieces = range(grid.num_pieces(expected.start), grid.num_pieces(expected.num_tokens))
        self._came = {
            rank: np.zeros((len(self._pieces), len(part.receiver_heads)), np.bool_)
            for rank, part in slices.items()
        }
        self._num_missing = sum(table.size for table in self._came.values())

    @property
    def is_complete(self) -> bool:
        return not self._num_missing

    def check(self, sender_rank: int, frame: Frame, payload: Payload | None) -> range:
        """The local heads that the frame is for.

        Raises TransferError if it is not within what is expected or came before, ChecksumError if
        its bytes changed on the way. Nothing is noted yet.
        """
        num_heads = self._came[sender_rank].shape[1]
        if not _is_within(frame.pieces, self._pieces) or not _is_within(
            frame.heads, range(num_heads)
        ):
            raise TransferError(
                f"frame of pieces {frame.pieces} and heads {frame.heads}, "
                f"but pieces {self._pieces} of {num_heads} heads are expected"
            )
        num_bytes = 0 if payload is None else len(payload)
        expected = len(frame.pieces) * len(frame.heads) * self._cell_bytes
        if payload is None or num_bytes != expected:
            raise TransferError(f"frame of {num_bytes} bytes where {expected} are expected")
        if self._cells(sender_rank, frame).any():
            raise TransferError(f"pieces {frame.pieces}, heads {frame.heads} came before")
        if frame.checksum != checksum(frame.handoff, frame.pieces, frame.heads, payload):
            raise ChecksumError(f"{num_bytes} bytes of pieces {frame.pieces} came damaged")
        first = self._slices[sender_rank].receiver_heads.start
        return range(first + frame.heads.start, first + frame.heads.stop)

    def begin(self, sender_rank: int, frame: Frame) -> None:
        """The frame, checked before, is on its way into the blocks: it may not come again."""
        self._cells(sender_rank, frame)[:] = True

    def received(self, frame: Frame) -> None:
        """It is there."""
        cells = len(frame.pieces) * len(frame.heads)
        self._num_missing -= cells
        self.num_bytes += cells * self._cell_bytes

    def _cells(
        self, sender_rank: int, frame: Frame
    ) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        first = self._pieces.start
        rows = slice(frame.pieces.start - first, frame.pieces.stop - first)
        return self._came[sender_rank][rows, frame.heads.start : frame.heads.stop]


def _is_within(part: range, whole: range) -> bool:
    return whole.start <= part.start < part.stop <= whole.stop
