"""What comes with a frame: its bytes, or the word where in the sender's cache they can be read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import BlockId

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """Pieces in the sender's blocks, for the receiver to copy."""

    blocks: tuple[BlockId, ...]  # of the sender
    first_piece: int  # counted from the first of these blocks on
    first_head: int  # of the sender's rank
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCache:
    """Another rank's cache ``[N, Hkv, L, 2, B, D]`` as this process can read it."""

    address: int
    num_blocks: int
    num_heads: int
    block_size: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """What a sender lent to this rank.

    ``check_valid`` raises TransferError if what was copied until now may be something else.
    """

    lent: Lent
    cache: RemoteCache
    check_valid: Callable[[], None]

    def __len__(self) -> int:
        return self.lent.num_bytes

    def check(self, num_pieces: int, num_heads: int, unit: int) -> None:
        """Raises TransferError if it is not within the sender's cache."""
        lent, cache = self.lent, self.cache
        per_block, odd = divmod(cache.block_size, unit)
        fits = (
            not odd
            and 0 <= lent.first_piece < per_block
            and lent.first_piece + num_pieces <= len(lent.blocks) * per_block
            and 0 <= lent.first_head <= cache.num_heads - num_heads
            and (not lent.blocks or 0 <= min(lent.blocks) <= max(lent.blocks) < cache.num_blocks)
        )
        if not fits:
            raise TransferError(
                f"{num_pieces} pieces of {unit} tokens and {num_heads} heads are not lent by {lent}"
            )


Payload = Bytes | torch.Tensor | Lent | Borrowed  # flat, uint8, contiguous; tensors on the device


@contextmanager
def allocating() -> Iterator[None]:
    """Raises TransferError, in CUDA's words, where there is no memory for a payload."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TransferError(f"no memory for a payload: {error}") from error


def in_host_memory(payload: Payload) -> Bytes:
    """The payload's bytes as an array, copied if they are on a device."""
    assert not isinstance(payload, Lent | Borrowed), "these bytes are elsewhere"
    return payload if isinstance(payload, np.ndarray) else payload.cpu().numpy()
