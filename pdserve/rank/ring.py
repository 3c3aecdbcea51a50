"""A ring of byte records in shared memory: one writer, N readers, each gets every record in order.

    <path>             64 bytes of header, then ``capacity`` bytes of 16-byte aligned records
    <path>.bell.<r>    FIFO, writer → reader r: one byte for each published record
    <path>.credit.<r>  FIFO, reader r → writer: one byte for each record that it copied out

A reader takes exactly as many records as it read bell bytes, a writer reuses exactly the space
whose credits it read: the order of memory is given by the system calls, and shared memory holds no
counter that could be torn. A record that its writer did not finish was never rung for, so no
reader sees it. When one side dies the kernel closes its ends of the FIFOs and the other side gets a
RankError, whatever it waits for.

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

MAGIC = b"pdsring1"
MAX_RECORDS = 2048  # in flight; below one page, the least that a FIFO holds, so no bell ever blocks

_HEADER = struct.Struct("<8sQQ")  # magic, capacity, number of readers
_HEADER_BYTES = 64
_RECORD = struct.Struct("<QQ")  # sequence number, payload bytes
_ALIGNMENT = 16  # the size of a record's header, which therefore never wraps


def create_ring(path: Path, *, capacity: int, num_readers: int) -> None:
    """Make the ring's files. ``capacity`` is a power of two; one record may fill half of it.

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
        self._ends: deque[int] = deque()  # head after each record in flight, oldest first
        self._credited = [
            0
        ] * num_readers  # of the records in flight, how many each reader gave back
        try:
            for reader in range(num_readers):
                self._credits.append(_open_fifo(_credit(path, reader), os.O_RDONLY))
                self._bells.append(_open_fifo(_bell(path, reader), os.O_WRONLY))
        except RankError:
            self.close()
            raise

    @property
    def max_record_bytes(self) -> int:
        return self._capacity // 2

    @property
    def slowest_fd(self) -> int:
        """Readable when the slowest reader gave space back or is gone: then ``try_write`` again.

        What the other readers give back makes no space.
        """
        return self._credits[self._slowest()]

    def try_write(self, record: bytes) -> bool:
        """Publish the record if there is space. RankError if it is too large or a reader gone."""
        size = _record_bytes(len(record))
        if size > self.max_record_bytes:
            raise RankError(
                f"ring {self._name}: a record of {len(record)} bytes; "
                f"at most {self.max_record_bytes - _RECORD.size} fit"
            )
        if not self._has_space(size):
            self._collect_credits()
            if not self._has_space(size):
                return False
        self._publish(record, size)
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

    def _has_space(self, size: int) -> bool:
        used = self._head - self._tail
        return used + size <= self._capacity and len(self._ends) < MAX_RECORDS

    def _publish(self, record: bytes, size: int) -> None:
        offset = self._head % self._capacity
        _RECORD.pack_into(self._data, offset, self._sequence, len(record))
        offset = (offset + _RECORD.size) % self._capacity
        first = min(len(record), self._capacity - offset)
        self._data[offset : offset + first] = record[:first]
        self._data[: len(record) - first] = record[first:]
        self._head += size
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
                num_records = len(os.read(fd, MAX_RECORDS))
            except BlockingIOError:
                continue
            if num_records == 0:
                raise self._lost(reader)
            self._credited[reader] += num_records
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
        self._rung = 0  # records rung for and not yet taken

    def fileno(self) -> int:
        """Readable when records are there or the writer is gone."""
        return self._bell

    def read(self, *, timeout_s: float | None) -> bytes | None:
        """The next record, or None if none came in time; without a timeout, wait as long as the
        writer lives.

        Raises RingClosedError if the writer is gone and all its records were taken, or after
        ``interrupt``; RankError if the ring is torn.
        """
        if self._rung == 0:
            ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
            if not ready:
                return None
            if (self._interrupted, select.POLLIN) in ready:
                raise RingClosedError(f"ring {self._name}: reading was ended on this side")
            self._listen()
        return self._take()

    def read_ready(self) -> list[bytes]:
        """The records of one look at the bell, none if there are none. Raises what ``read`` does.

        While ``fileno`` stays readable there are more.
        """
        record = self.read(timeout_s=0)
        if record is None:
            return []
        return [record, *(self._take() for _ in range(self._rung))]

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
        rung = len(os.read(self._bell, MAX_RECORDS))
        if rung == 0:
            raise RingClosedError(f"ring {self._name}: its writer is gone")
        self._rung += rung

    def _take(self) -> bytes:
        offset = self._position % self._capacity
        sequence, length = _RECORD.unpack_from(self._data, offset)
        if sequence != self._sequence or _record_bytes(length) > self._capacity // 2:
            raise RankError(
                f"ring {self._name}: torn: record {sequence} of {length} bytes "
                f"where record {self._sequence} was expected"
            )
        offset = (offset + _RECORD.size) % self._capacity
        record = bytes(self._data[offset : offset + length])
        if len(record) < length:
            record += self._data[: length - len(record)]
        self._position += _record_bytes(length)
        self._sequence += 1
        self._rung -= 1
        os.write(self._credit, b"\0")
        return record


def _record_bytes(length: int) -> int:
    return -(-(length + _RECORD.size) // _ALIGNMENT) * _ALIGNMENT


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
