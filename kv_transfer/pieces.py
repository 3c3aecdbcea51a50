"""Copies pieces of blocks between a rank's KV cache and flat payloads, many pieces in one call.

A payload is the bytes of ``[P, H, L, 2, u, D]`` (pieces, heads, layers, k/v, tokens of a piece,
head size), or says where in another rank's cache they are. Owns the views of the cache; knows
neither handoffs nor links. A gather is over when the call returns, a scatter when it says so.

``HostPieces`` indexes with numpy: a torch index over that many bytes opens a parallel region, and
on a loaded host that waits for the compute threads (measured: 0.1 ms became 28 ms). On a GPU one
kernel does it (``device_pieces.py``).
"""

import ctypes
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.payload import Borrowed, Bytes, Payload, RemoteCache, in_host_memory
from pdserve.core.errors import InternalError, TransferError
from pdserve.core.kv_layout import BlockId, KvLayout

DEVICE_PIECES = "kv_transfer.device_pieces", "DevicePieces"

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Copying(Protocol):
    """A copy that was begun."""

    @property
    def is_over(self) -> bool: ...

    def wait(self) -> None:
        """Until it is over."""


class Pieces(Protocol):
    """The pieces of one cache. ``blocks`` is a block table; its first piece is piece 0."""

    num_blocks: int

    def warm_up(self, unit: int) -> None:
        """Get ready for a peer with other blocks than ours: pieces of ``unit`` tokens."""

    def blank(self, num_bytes: int) -> Payload:
        """A payload of zeros, for warming links."""

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        """Copy pieces of ``unit`` tokens out of the cache; on a GPU begin to, on the stream of
        payloads.
        """

    def drain(self) -> None:
        """Return when nothing that is gathered is read any more."""

    def in_host_memory(self, payload: Payload) -> Bytes:
        """What was gathered, copied if it is on a device."""

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Copying:
        """Begin to copy a payload into the cache.

        Raises TransferError if it lies outside its sender's cache.
        """


OpenPieces = Callable[[torch.Tensor, torch.cuda.Stream | None], Pieces]


def open_pieces(
    kv: torch.Tensor, layout: KvLayout, stream: torch.cuda.Stream | None = None
) -> Pieces:
    """The pieces of ``kv`` ``[N, Hkv, L, 2, B, D]``, one rank's cache. On a GPU payloads belong to
    ``stream``, by default one of their own.

    Raises InternalError if the tensor is not what the layout says.
    """
    _check(kv, layout)
    if kv.device.type == "cpu":
        return HostPieces(kv)
    module, name = DEVICE_PIECES
    make = cast("OpenPieces", getattr(import_module(module), name))
    return make(kv, stream)


def check_blocks(blocks: Sequence[BlockId], num_blocks: int) -> None:
    """Raises TransferError if a block is not one of the cache's."""
    if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
        raise TransferError(f"a block of {list(blocks)} is not one of this rank's {num_blocks}")


class _Over:
    """What a processor has copied."""

    is_over = True

    def wait(self) -> None:
        """There is nothing to wait for."""


class HostPieces:
    """A cache in host memory."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.num_blocks = kv.shape[0]
        self._kv: Bytes = kv.view(torch.uint8).numpy()  # [N, Hkv, L, 2, B, D·bytes]

    def warm_up(self, unit: int) -> None:
        """Nothing is compiled here."""

    def blank(self, num_bytes: int) -> Payload:
        return np.zeros(num_bytes, np.uint8)

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        return _gather(self._kv, blocks, pieces, heads, unit)

    def drain(self) -> None:
        """It is copied at once."""

    def in_host_memory(self, payload: Payload) -> Bytes:
        return in_host_memory(payload)

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Copying:
        view = _view(self._kv, heads, unit)
        where = piece_index(blocks, pieces, self._kv.shape[4] // unit)
        data = self._fetch(payload, len(pieces), len(heads), unit)
        view[where] = data.reshape(len(pieces), *view.shape[2:])
        return _Over()

    def _fetch(self, payload: Payload, num_pieces: int, num_heads: int, unit: int) -> Bytes:
        if not isinstance(payload, Borrowed):
            return in_host_memory(payload)
        payload.check(num_pieces, num_heads, unit)
        lent = payload.lent
        pieces = range(lent.first_piece, lent.first_piece + num_pieces)
        heads = range(lent.first_head, lent.first_head + num_heads)
        return _gather(self._mapped(payload.cache), lent.blocks, pieces, heads, unit)

    def _mapped(self, cache: RemoteCache) -> Bytes:
        """``[N, Hkv, L, 2, B, D·bytes]`` of a cache that this process can read."""
        num_layers, row = self._kv.shape[2], self._kv.shape[5]
        head = num_layers * 2 * cache.block_size * row
        shape = (cache.num_blocks, cache.num_heads, num_layers, 2, cache.block_size, row)
        size = (cache.num_blocks - 1) * cache.block_stride_bytes + cache.num_heads * head
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(cache.address))
        plane = cache.block_size * row
        strides = (cache.block_stride_bytes, head, 2 * plane, plane, row, 1)
        return np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=False)


def _gather(kv: Bytes, blocks: Sequence[BlockId], pieces: range, heads: range, unit: int) -> Bytes:
    where = piece_index(blocks, pieces, kv.shape[4] // unit)
    return np.ascontiguousarray(_view(kv, heads, unit)[where]).reshape(-1)


def _view(kv: Bytes, heads: range, unit: int) -> Bytes:
    """``[N, pieces of a block, H, L, 2, u·D·bytes]``, sharing the cache's memory."""
    num_blocks, num_heads, num_layers, two, block_size, row = kv.shape
    shape = (num_blocks, num_heads, num_layers, two, block_size // unit, unit * row)
    view = kv.reshape(shape).transpose(0, 4, 1, 2, 3, 5)
    assert np.may_share_memory(view, kv), "reshape made a copy"
    return view[:, :, heads.start : heads.stop]


def piece_index(
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
