"""Copies pieces of blocks between a rank's KV cache and flat payloads, many pieces in one call.

A payload is the bytes of ``[P, H, L, 2, u, D]`` (pieces, heads, layers, k/v, tokens of a piece,
head size). Owns the views of the cache; knows neither handoffs nor links. A copy is over when the
call returns.

``HostPieces`` indexes with numpy: a torch index over that many bytes opens a parallel region, and
on a loaded host that waits for the compute threads (measured: 0.1 ms became 28 ms).
``DevicePieces`` is plain torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve.core.errors import InternalError, TransferError
from pdserve.core.kv_layout import BlockId, KvLayout

Bytes = npt.NDArray[np.uint8]
Payload = Bytes | torch.Tensor  # flat, uint8, contiguous; a tensor is on the cache's device

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Pieces(Protocol):
    """The pieces of one cache. ``blocks`` is a block table; its first piece is piece 0."""

    num_blocks: int

    def blank(self, num_bytes: int) -> Payload:
        """A payload of zeros, for warming links."""

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        """Copy pieces of ``unit`` tokens out of the cache."""

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> None:
        """Copy a payload into the cache."""


def in_host_memory(payload: Payload) -> Bytes:
    """The payload as an array, copied if it is on a device."""
    return payload if isinstance(payload, np.ndarray) else payload.cpu().numpy()


def open_pieces(kv: torch.Tensor, layout: KvLayout) -> Pieces:
    """The pieces of ``kv`` ``[N, Hkv, L, 2, B, D]``, one rank's cache.

    Raises InternalError if the tensor is not what the layout says.
    """
    _check(kv, layout)
    return HostPieces(kv) if kv.device.type == "cpu" else DevicePieces(kv)


def check_blocks(blocks: Sequence[BlockId], num_blocks: int) -> None:
    """Raises TransferError if a block is not one of the cache's."""
    if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
        raise TransferError(f"a block of {list(blocks)} is not one of this rank's {num_blocks}")


class HostPieces:
    """A cache in host memory."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.num_blocks = kv.shape[0]
        self._kv: Bytes = kv.view(torch.uint8).numpy()  # [N, Hkv, L, 2, B, D·bytes]

    def blank(self, num_bytes: int) -> Payload:
        return np.zeros(num_bytes, np.uint8)

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        where = _index(blocks, pieces, self._kv.shape[4] // unit)
        return np.ascontiguousarray(self._view(heads, unit)[where]).reshape(-1)

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> None:
        view = self._view(heads, unit)
        where = _index(blocks, pieces, self._kv.shape[4] // unit)
        view[where] = in_host_memory(payload).reshape(len(pieces), *view.shape[2:])

    def _view(self, heads: range, unit: int) -> Bytes:
        """``[N, pieces of a block, H, L, 2, u·D·bytes]``, sharing the cache's memory."""
        num_blocks, num_heads, num_layers, two, block_size, row = self._kv.shape
        shape = (num_blocks, num_heads, num_layers, two, block_size // unit, unit * row)
        view = self._kv.reshape(shape).transpose(0, 4, 1, 2, 3, 5)
        assert np.may_share_memory(view, self._kv), "reshape made a copy"
        return view[:, :, heads.start : heads.stop]


class DevicePieces:
    """A cache anywhere torch can index; copies run on a stream of their own."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.num_blocks = kv.shape[0]
        self._kv = kv
        self._stream: torch.cuda.Stream | None = None
        if kv.device.type == "cuda":
            self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def blank(self, num_bytes: int) -> Payload:
        with self._copying():
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._kv.device)

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        with self._copying():
            data = self._view(heads, unit)[self._where(blocks, pieces, unit)]
            return data.contiguous().view(-1).view(torch.uint8)

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> None:
        with self._copying():
            view = self._view(heads, unit)
            data = torch.from_numpy(payload.copy()) if isinstance(payload, np.ndarray) else payload
            data = data.to(self._kv.device).view(self._kv.dtype)
            where = self._where(blocks, pieces, unit)
            view[where] = data.view(len(pieces), *view.shape[2:])

    def _view(self, heads: range, unit: int) -> torch.Tensor:
        """``[N, pieces of a block, H, L, 2, u, D]``."""
        cut = self._kv.view(*self._kv.shape[:4], -1, unit, self._kv.shape[5])
        cut = cut.permute(0, 4, 1, 2, 3, 5, 6)
        return cut[:, :, heads.start : heads.stop]

    def _where(
        self, blocks: Sequence[BlockId], pieces: range, unit: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index, within = _index(blocks, pieces, self._kv.shape[4] // unit)
        device = self._kv.device
        return torch.from_numpy(index).to(device), torch.from_numpy(within).to(device)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()  # sync: the front may reuse the blocks, links send the payload


def _index(
    blocks: Sequence[BlockId], pieces: range, pieces_per_block: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Block and piece within the block, of each piece."""
    first, last = pieces.start // pieces_per_block, -(-pieces.stop // pieces_per_block)
    table = np.asarray(blocks[first:last], dtype=np.int64)
    numbers = np.arange(pieces.start, pieces.stop, dtype=np.int64)
    return table[numbers // pieces_per_block - first], numbers % pieces_per_block


def _check(kv: torch.Tensor, layout: KvLayout) -> None:
    dtype = TORCH_DTYPES[layout.dtype]
    shape = (*kv.shape[:1], *layout.block_shape)
    if kv.dtype != dtype or tuple(kv.shape) != shape:
        raise InternalError(
            f"kv: expected {dtype} [N, {', '.join(map(str, shape[1:]))}], got {kv.dtype} "
            f"{list(kv.shape)}"
        )
    if kv.shape[0] and not kv[0].is_contiguous():
        raise InternalError(f"kv: a block must be one contiguous run, strides are {kv.stride()}")
