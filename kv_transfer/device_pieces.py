"""Pieces of a cache on a GPU: one call copies a whole list of them, in, out, or from elsewhere.

Where a piece is one run of bytes on both sides, another rank's pieces are fetched by the copy
engines (``copy_engine.py``), which leave the multiprocessors to the steps of the model.

Else one kernel does it. A run of heads of one piece is rows of ``u·D`` elements: one after the
other in a payload, ``B·D`` elements apart in a block of ``B`` tokens. So gathering, scattering and
reading from another rank's mapped cache are one kernel with three sets of strides, all in words of
4 bytes and multiples of ``VECTOR``. ``HostPieces`` is the oracle of both.

Copies run on streams of their own; those on one stream follow each other. Gathering and scattering
wait for no copy; ``drain`` and whoever is given one do.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.copy_engine import copy_all
from kv_transfer.payload import Borrowed, Bytes, Lent, Payload, in_host_memory
from kv_transfer.pieces import Copying, piece_index
from kv_transfer.triton_kernels import copy_pieces
from pdserve.core.errors import InternalError
from pdserve.core.kv_layout import BlockId

WORD, VECTOR = 4, 16  # bytes
MAX_ITEMS = 4096  # of one launch
NUM_LISTS = 4  # launches that may be queued
LOCAL_PROGRAMS, REMOTE_PROGRAMS = 132, 24
TILE, NUM_WARPS = 16384, 32

# Between two H200s, 500 copies of 2 MiB: one costs the host 1 to 3 us and the engines 5.4, so these
# begin with few and later parts are taken in meanwhile. Lists on one stream reach 347 GB/s,
# on two 365, on four 375, and a kernel with 24 programs 356. Products of a decode step beside them
# took 9 % longer, beside that kernel 34 % (one step each). The size of the first part is a guess.
FIRST_PART = 16

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Side:
    """Where the pieces begin, in words from ``address``; ``row_stride`` in words as well."""

    address: int
    starts: Words
    row_stride: int


class _Recorded:
    """A copy that is over when the streams have come so far. What it reads lives as long."""

    def __init__(self, *streams: torch.cuda.Stream, reads: torch.Tensor | None = None) -> None:
        self._reads = reads
        self._events = [stream.record_event() for stream in streams]

    @property
    def is_over(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()  # sync: blocks and payload are someone else's next


class _List:
    """Where pieces begin, here and on the device; used again when a launch has read it."""

    def __init__(self, device: torch.device) -> None:
        self._here = torch.empty(2 * MAX_ITEMS, dtype=torch.int64).pin_memory()
        self._there = torch.empty_like(self._here, device=device)
        self._read: torch.cuda.Event | None = None

    def fill(self, targets: Words, sources: Words) -> torch.Tensor:
        """Both, one behind the other, as they will be on the device: in the current stream."""
        if self._read is not None:
            self._read.synchronize()  # sync: only where many launches wait
        count = len(targets)
        numbers = self._here.numpy()
        numbers[:count], numbers[count : 2 * count] = targets, sources
        self._there[: 2 * count].copy_(self._here[: 2 * count], non_blocking=True)
        return self._there

    def read_on(self, stream: torch.cuda.Stream) -> None:
        """The launch that reads it is queued there."""
        self._read = stream.record_event()


class DevicePieces:
    """A cache in a GPU's memory."""

    def __init__(self, kv: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self.num_blocks = kv.shape[0]
        self._kv = kv
        self._num_rows = kv.shape[2] * kv.shape[3]  # of one head
        row_bytes = kv.shape[5] * kv.element_size()
        self._token_words = row_bytes // WORD
        self._stride_bytes = kv.stride(0) * kv.element_size()
        sizes = kv.data_ptr(), self._stride_bytes, row_bytes
        if any(size % VECTOR for size in sizes):
            raise InternalError(
                f"kv: address, block stride and row must be multiples of {VECTOR}, got {sizes}"
            )
        self._stream = stream or torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        self._engines = (
            torch.cuda.Stream(kv.device),  # type: ignore[no-untyped-call]
            torch.cuda.Stream(kv.device),  # type: ignore[no-untyped-call]
        )
        self._lists = deque(_List(kv.device) for _ in range(NUM_LISTS))
        self._try_out(kv.shape[4] * self._token_words, stride=1)

    def warm_up(self, unit: int) -> None:
        self._try_out(unit * self._token_words, stride=2)

    def blank(self, num_bytes: int) -> Payload:
        with torch.cuda.stream(self._stream):
            data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._kv.device)
        self._stream.synchronize()  # sync: links send it on another stream
        return data

    def gather(
        self, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Payload:
        num_rows, row = len(heads) * self._num_rows, unit * self._token_words
        with torch.cuda.stream(self._stream):
            num_bytes = len(pieces) * num_rows * row * WORD
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._kv.device)
        source = self._here(blocks, pieces, heads.start, unit)
        self._copy(_flat(data, len(pieces), num_rows * row, row), source, num_rows, row)
        return data

    def drain(self) -> None:
        self._stream.synchronize()  # sync: the blocks are someone else's next

    def in_host_memory(self, payload: Payload) -> Bytes:
        with torch.cuda.stream(self._stream):  # on another one a step of the model would go first
            return in_host_memory(payload)

    def scatter(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, *, unit: int
    ) -> Copying:
        with ExitStack() as undo:  # what fails half way has begun, and nobody else waits for that
            undo.callback(self._wait)
            copying = self._begin(payload, blocks, pieces, heads, unit)
            undo.pop_all()
        return copying

    def _begin(
        self, payload: Payload, blocks: Sequence[BlockId], pieces: range, heads: range, unit: int
    ) -> _Recorded:
        num_rows, row = len(heads) * self._num_rows, unit * self._token_words
        target = self._here(blocks, pieces, heads.start, unit)
        if not isinstance(payload, Borrowed):
            data = self._on_device(payload)
            self._copy(target, _flat(data, len(pieces), num_rows * row, row), num_rows, row)
            return _Recorded(self._stream, reads=data)
        payload.check(len(pieces), len(heads), unit)
        source = self._there(payload, len(pieces), unit)
        if target.row_stride == source.row_stride == row:
            self._fetch(target, source, num_rows * row)
            return _Recorded(*self._engines)
        self._copy(target, source, num_rows, row, REMOTE_PROGRAMS)
        return _Recorded(self._stream)

    def _wait(self) -> None:
        """Until nothing is being copied."""
        _Recorded(self._stream, *self._engines).wait()

    def _on_device(self, payload: Payload) -> torch.Tensor:
        assert not isinstance(payload, Lent | Borrowed), "these bytes are elsewhere"
        if isinstance(payload, torch.Tensor):
            return payload
        with torch.cuda.stream(self._stream):
            return torch.from_numpy(payload.copy()).to(self._kv.device)

    def _try_out(self, row: int, *, stride: int) -> None:
        """Compile and load the kernel for rows ``stride`` rows apart, in a buffer of its own."""
        with torch.cuda.stream(self._stream):
            scratch = torch.zeros(2 * row, dtype=torch.int32, device=self._kv.device)
        target, source = (
            _Side(scratch.data_ptr(), np.full(1, start, np.int64), stride * row)
            for start in (0, row)
        )
        self._copy(target, source, 1, row)
        self._stream.synchronize()  # sync: the same words are copied next
        self._fetch(target, source, row)
        _Recorded(*self._engines).wait()

    def _here(self, blocks: Sequence[BlockId], pieces: range, head: int, unit: int) -> _Side:
        address, block_size = self._kv.data_ptr(), self._kv.shape[4]
        return self._side(address, self._stride_bytes, block_size, blocks, pieces, head, unit)

    def _there(self, borrowed: Borrowed, num_pieces: int, unit: int) -> _Side:
        lent, cache = borrowed.lent, borrowed.cache
        pieces = range(lent.first_piece, lent.first_piece + num_pieces)
        return self._side(
            cache.address,
            cache.block_stride_bytes,
            cache.block_size,
            lent.blocks,
            pieces,
            lent.first_head,
            unit,
        )

    def _side(
        self,
        address: int,
        block_stride_bytes: int,
        block_size: int,
        blocks: Sequence[BlockId],
        pieces: range,
        head: int,
        unit: int,
    ) -> _Side:
        """The pieces from ``head`` on, in a cache of blocks of ``block_size`` tokens."""
        index, within = piece_index(blocks, pieces, block_size // unit)
        row_stride = block_size * self._token_words
        first = head * self._num_rows * row_stride
        starts = index * (block_stride_bytes // WORD) + within * unit * self._token_words + first
        return _Side(address, starts, row_stride)

    def _fetch(self, target: _Side, source: _Side, size: int) -> None:
        """Copy pieces that are runs of ``size`` words on both sides; neighbours in one go."""
        begins = np.ones(len(target.starts), np.bool_)
        begins[1:] = (np.diff(target.starts) != size) | (np.diff(source.starts) != size)
        first = np.flatnonzero(begins)
        lengths = np.diff(first, append=len(begins)) * size
        targets = _bytes(target.address, target.starts[first])
        sources = _bytes(source.address, source.starts[first])
        sizes = _bytes(0, lengths)
        with torch.cuda.stream(self._stream):
            self._stream.query()  # makes the device's context this thread's
            for turn, part in enumerate(_parts(len(first))):
                engine = self._engines[turn % 2]
                copy_all(targets[part], sources[part], sizes[part], engine)

    def _copy(
        self, target: _Side, source: _Side, num_rows: int, row: int, programs: int = LOCAL_PROGRAMS
    ) -> None:
        """Copy pieces of ``num_rows`` rows of ``row`` words."""
        is_run = target.row_stride == source.row_stride == row
        for first in range(0, len(target.starts), MAX_ITEMS):
            part = slice(first, first + MAX_ITEMS)
            self._lists.rotate(-1)
            with torch.cuda.stream(self._stream):
                copy_pieces[(programs,)](
                    target.address,
                    source.address,
                    self._lists[0].fill(target.starts[part], source.starts[part]),
                    len(target.starts[part]),
                    num_rows * row,
                    target.row_stride,
                    source.row_stride,
                    ROW=0 if is_run else row,
                    TILE=TILE,
                    num_warps=NUM_WARPS,
                )
            self._lists[0].read_on(self._stream)


def _parts(count: int) -> list[slice]:
    """Of a list: each twice as long as the one before, the last two alike."""
    parts, begin, length = [], 0, FIRST_PART
    while count - begin > 2 * length:
        parts.append(slice(begin, begin + length))
        begin, length = begin + length, 2 * length
    middle = begin + -(-(count - begin) // 2) if parts else count
    return [*parts, slice(begin, middle), *([slice(middle, count)] if middle < count else [])]


def _flat(data: torch.Tensor, num_pieces: int, piece: int, row: int) -> _Side:
    return _Side(data.data_ptr(), np.arange(num_pieces, dtype=np.int64) * piece, row)


def _bytes(address: int, words: Words) -> npt.NDArray[np.uint64]:
    """Addresses, or sizes, of words from ``address`` on."""
    return (words * WORD + address).astype(np.uint64)
