"""A ring of byte records in shared memory: one writer, N readers, each gets every record in order.

    <path>             64 bytes of header, then ``capacity`` bytes of 16-byte aligned parts
    <path>.bell.<r>    FIFO, writer → reader r: one byte for each published part
    <path>.credit.<r>  FIFO, reader r → writer: one byte for each part that it copied out

Nearly every record is one part. One that would take more than half of the ring goes in several, as
the readers make space, so that there is no record that does not fit. A reader takes exactly as many
parts as it read bell bytes, a writer reuses exactly the space whose credits it read: the order of
memory is given by the system calls, and shared memory holds no counter that could be torn. A part
that its writer did not finish was never rung for, and a record lacks its last part until it is
whole, so no reader sees half of one. When one side dies the kernel closes its ends of the FIFOs and
the other side gets a RankError, whatever it waits for.

Owns files, mapping and FIFOs; knows nothing of what the records mean.
"""

import errno
import mmap
import os
import select
import struct
import time
from collections import deque
from pathlib import Path

from pdserve.core.errors import RankError, RingClosedError

MAGIC = b"pdsring2"
MAX_PARTS = 2048  # in flight; below one page, the least that a FIFO holds, so no bell ever blocks

_HEADER = struct.Struct("<8sQQ")  # magic, capacity, number of readers
_HEADER_BYTES = 64
_PART = struct.Struct("<QLHH")  # sequence number, payload bytes, first and last of its record
_ALIGNMENT = 16  # the size of a part's header, which therefore never wraps


def create_ring(path: Path, *, capacity: int, num_readers: int) -> None:
    """Make the ring's files. ``capacity`` is a power of two; one part may fill half of it.

    The memory is reserved here: a full /dev/shm is a RankError now, not a SIGBUS in mid-write.
    """
    assert capacity >= _HEADER_BYTES, capacity
    assert capacity & (capacity - 1) == 0, f"{capacity} is not a power of two"
    assert num_readers >= 1
    try:
        for reader in range(num_readers):
            os.mkfifo(_bell(path, reader), 0o600)
            os.mkfifo(_credit(path, reader), 0o600)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, _HEADER_BYTES + capacity)
            os.pwrite(fd, _HEADER.pack(MAGIC, capacity, num_readers), 0)
        finally:
            os.close(fd)
    except OSError as error:
        remove_ring(path)
        raise RankError(f"ring {path}: cannot reserve {capacity} bytes: {error}") from error


def remove_ring(path: Path) -> None:
    """Unlink the ring's files. Open ends go on working; the memory goes with the last of them."""
    path.unlink(missing_ok=True)
    for end in ("bell", "credit"):
        for fifo in path.parent.glob(f"{path.name}.{end}.*"):
            fifo.unlink(missing_ok=True)


class RingWriter:
    """The writing end. One thread at a time. All readers must have opened their ends before."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._map, self._capacity, num_readers = _open_map(path, writable=True)
        self._data = memoryview(self._map)[_HEADER_BYTES:]
        self._bells: list[int] = []
        self._credits: list[int] = []
        self._head = 0  # bytes ever written
        self._tail = 0  # bytes that every reader has given back
        self._sequence = 0
        self._begun: bytes | None = None  # the record that is partly out
        self._num_out = 0  # bytes of it
        self._ends: deque[int] = deque()  # head after each part in flight, oldest first
        self._credited = [0] * num_readers  # of the parts in flight, how many each gave back
        try:
            for reader in range(num_readers):
                self._credits.append(_open_fifo(_credit(path, reader), os.O_RDONLY))
                self._bells.append(_open_fifo(_bell(path, reader), os.O_WRONLY))
        except RankError:
            self.close()
            raise

    @property
    def max_part_bytes(self) -> int:
        """What one part holds at most."""
        return self._capacity // 2 - _PART.size

    @property
    def slowest_fd(self) -> int:
        """Readable when the slowest reader gave space back or is gone: then ``try_write`` again.

        What the other readers give back makes no space.
        """
        return self._credits[self._slowest()]

    def try_write(self, record: bytes) -> bool:
        """Publish the record if there is space. RankError if a reader is gone.

        False: try again with this very record, of which some parts may be out. Where another one
        comes instead, this one is given up and nobody gets it.
        """
        if record is not self._begun:
            self._begun, self._num_out = record, 0
        while self._begun is not None:
            part = memoryview(record)[self._num_out : self._num_out + self.max_part_bytes]
            if not self._make_space(_part_bytes(len(part))):
                return False
            is_last = self._num_out + len(part) == len(record)
            self._publish(part, is_first=self._num_out == 0, is_last=is_last)
            self._num_out += len(part)
            if is_last:
                self._begun = None
        return True

    def write(self, record: bytes, *, timeout_s: float) -> None:
        """Publish the record, waiting for space. RankError if there is none in ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self.try_write(record):
            poll = select.poll()
            poll.register(self.slowest_fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise self.no_space(len(record), timeout_s)

    def no_space(self, num_bytes: int, timeout_s: float) -> RankError:
        """The error of a writer that waited in vain."""
        return RankError(
            f"ring {self._name}: reader {self._slowest()} left no space for a record of "
            f"{num_bytes} bytes within {timeout_s} s"
        )

    def close(self) -> None:
        """Close this end; the readers get every record published so far, then a RankError."""
        for fd in (*self._bells, *self._credits):
            os.close(fd)
        self._bells, self._credits = [], []
        self._data.release()
        self._map.close()

    def _make_space(self, size: int) -> bool:
        if not self._has_space(size):
            self._collect_credits()
        return self._has_space(size)

    def _has_space(self, size: int) -> bool:
        used = self._head - self._tail
        return used + size <= self._capacity and len(self._ends) < MAX_PARTS

    def _publish(self, part: memoryview, *, is_first: bool, is_last: bool) -> None:
        offset = self._head % self._capacity
        _PART.pack_into(self._data, offset, self._sequence, len(part), is_first, is_last)
        offset = (offset + _PART.size) % self._capacity
        first = min(len(part), self._capacity - offset)
        self._data[offset : offset + first] = part[:first]
        self._data[: len(part) - first] = part[first:]
        self._head += _part_bytes(len(part))
        self._sequence += 1
        self._ends.append(self._head)
        for reader, fd in enumerate(self._bells):
            try:
                os.write(fd, b"\0")
            except BrokenPipeError as error:
                raise self._lost(reader) from error

    def _collect_credits(self) -> None:
        for reader, fd in enumerate(self._credits):
            try:
                num_parts = len(os.read(fd, MAX_PARTS))
            except BlockingIOError:
                continue
            if num_parts == 0:
                raise self._lost(reader)
            self._credited[reader] += num_parts
        num_free = min(self._credited)
        for _ in range(num_free):
            self._tail = self._ends.popleft()
        self._credited = [count - num_free for count in self._credited]

    def _slowest(self) -> int:
        return self._credited.index(min(self._credited))

    def _lost(self, reader: int) -> RingClosedError:
        return RingClosedError(f"ring {self._name}: reader {reader} is gone")


class RingReader:
    """One reading end. One thread at a time."""

    def __init__(self, path: Path, reader: int = 0) -> None:
        self._name = path.name
        self._map, self._capacity, num_readers = _open_map(path, writable=False)
        assert reader < num_readers, f"reader {reader} of a ring for {num_readers}"
        self._data = memoryview(self._map)[_HEADER_BYTES:]
        # Read-write, because the writer may open its end later; its death shows on the bell.
        self._credit = _open_fifo(_credit(path, reader), os.O_RDWR)
        self._bell = _open_fifo(_bell(path, reader), os.O_RDONLY)
        self._interrupted = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(self._interrupted, select.POLLIN)
        self._position = 0  # bytes ever taken
        self._sequence = 0
        self._rung = 0  # parts rung for and not yet taken
        self._parts: list[bytes] = []  # of the record that is not whole yet

    def fileno(self) -> int:
        """Readable when records are there or the writer is gone."""
        return self._bell

    def read(self, *, timeout_s: float | None) -> bytes | None:
        """The next record, or None if nothing of it came in time; without a timeout, wait as long
        as the writer lives.

        Raises RingClosedError if the writer is gone and all its records were taken, or after
        ``interrupt``; RankError if the ring is torn.
        """
        while True:
            if self._rung == 0:
                ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
                if not ready:
                    return None
                if (self._interrupted, select.POLLIN) in ready:
                    raise RingClosedError(f"ring {self._name}: reading was ended on this side")
                self._listen()
            if (record := self._take()) is not None:
                return record

    def read_ready(self) -> list[bytes]:
        """The records of one look at the bell, none if there are none. Raises what ``read`` does.

        While ``fileno`` stays readable there are more.
        """
        record = self.read(timeout_s=0)
        if record is None:
            return []
        others = [self._take() for _ in range(self._rung)]
        return [record, *(other for other in others if other is not None)]

    def interrupt(self) -> None:
        """End a ``read`` that waits in another thread, and every later one that would."""
        os.eventfd_write(self._interrupted, 1)

    def close(self) -> None:
        os.close(self._bell)
        os.close(self._credit)
        os.close(self._interrupted)
        self._data.release()
        self._map.close()

    def _listen(self) -> None:
        rung = len(os.read(self._bell, MAX_PARTS))
        if rung == 0:
            raise RingClosedError(f"ring {self._name}: its writer is gone")
        self._rung += rung

    def _take(self) -> bytes | None:
        """The next part; the record, if it was its last one."""
        offset = self._position % self._capacity
        sequence, length, is_first, is_last = _PART.unpack_from(self._data, offset)
        if sequence != self._sequence or _part_bytes(length) > self._capacity // 2:
            raise RankError(
                f"ring {self._name}: torn: part {sequence} of {length} bytes "
                f"where part {self._sequence} was expected"
            )
        offset = (offset + _PART.size) % self._capacity
        part = bytes(self._data[offset : offset + length])
        if len(part) < length:
            part += self._data[: length - len(part)]
        self._position += _part_bytes(length)
        self._sequence += 1
        self._rung -= 1
        os.write(self._credit, b"\0")
        if is_first:
            self._parts.clear()  # of a record that its writer gave up
        if is_last and not self._parts:
            return part
        self._parts.append(part)
        if not is_last:
            return None
        record = b"".join(self._parts)
        self._parts.clear()
        return record


def _part_bytes(length: int) -> int:
    return -(-(length + _PART.size) // _ALIGNMENT) * _ALIGNMENT


def _bell(path: Path, reader: int) -> Path:
    return path.with_name(f"{path.name}.bell.{reader}")


def _credit(path: Path, reader: int) -> Path:
    return path.with_name(f"{path.name}.credit.{reader}")


def _open_fifo(path: Path, mode: int) -> int:
    try:
        return os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        problem = "its reader has not opened it" if error.errno == errno.ENXIO else str(error)
        raise RankError(f"ring {path}: {problem}") from error


def _open_map(path: Path, *, writable: bool) -> tuple[mmap.mmap, int, int]:
    try:
        with path.open("r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(file.fileno(), 0, access=access)
    except (OSError, ValueError) as error:
        raise RankError(f"ring {path}: cannot be opened: {error}") from error
    if len(mapping) >= _HEADER_BYTES:
        magic, capacity, num_readers = _HEADER.unpack_from(mapping)
        if magic == MAGIC and len(mapping) == _HEADER_BYTES + capacity:
            return mapping, capacity, num_readers
    mapping.close()
    raise RankError(f"ring {path}: not a ring of this version")
