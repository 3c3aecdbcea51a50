"""One handoff on the receiver's rank: what is expected from which sender rank, what has come.

A *cell* is one head of one piece. Every cell of the prompt comes exactly once, from the sender rank
that reshard names. Pure bookkeeping.
"""

import numpy as np

from kv_transfer.commands import ExpectHandoff
from kv_transfer.messages import Frame, checksum
from kv_transfer.pieces import Payload, check_blocks
from kv_transfer.reshard import HeadSlice, PieceGrid
from pdserve.core.errors import ChecksumError, TransferError


class Incoming:
    """Owns which cells have come. Raises TransferError if the blocks can not hold the prompt."""

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
        self.handoff = expected.handoff
        self.peer_id = expected.peer_id
        self.blocks = expected.blocks
        self.unit = grid.unit
        self.num_bytes = 0
        self._cell_bytes = cell_bytes
        self._slices = slices
        self._num_pieces = grid.num_pieces(expected.num_tokens)
        self._came = {
            rank: np.zeros((self._num_pieces, len(part.receiver_heads)), np.bool_)
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
        table = self._came[sender_rank]
        if not _is_within(frame.pieces, table.shape[0]) or not _is_within(
            frame.heads, table.shape[1]
        ):
            raise TransferError(
                f"frame of pieces {frame.pieces} and heads {frame.heads}, "
                f"but {table.shape[0]} pieces of {table.shape[1]} heads are expected"
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

    def received(self, sender_rank: int, frame: Frame) -> None:
        """The frame, checked before, is in the blocks."""
        self._cells(sender_rank, frame)[:] = True
        cells = len(frame.pieces) * len(frame.heads)
        self._num_missing -= cells
        self.num_bytes += cells * self._cell_bytes

    def _cells(
        self, sender_rank: int, frame: Frame
    ) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        table = self._came[sender_rank]
        return table[frame.pieces.start : frame.pieces.stop, frame.heads.start : frame.heads.stop]


def _is_within(part: range, size: int) -> bool:
    return 0 <= part.start < part.stop <= size
