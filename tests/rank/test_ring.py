"""The ring in one process: order, wrap, space, errors."""

import asyncio
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import RankError
from pdserve.rank.outlet import Outlet
from pdserve.rank.ring import MAX_PARTS, RingReader, RingWriter, create_ring, remove_ring

CAPACITY = 256


@contextmanager
def ring(
    capacity: int = CAPACITY, num_readers: int = 1
) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ring"
        create_ring(path, capacity=capacity, num_readers=num_readers)
        readers = [RingReader(path, reader) for reader in range(num_readers)]
        writer = RingWriter(path)
        yield writer, readers
        writer.close()
        for reader in readers:
            reader.close()


def ring_bytes(records: Iterable[bytes]) -> int:
    return sum(-(-(16 + len(record)) // 16) * 16 for record in records)


@given(
    num_readers=st.integers(1, 4),
    steps=st.lists(
        st.one_of(
            st.binary(max_size=CAPACITY // 2 - 16),  # in one part
            st.tuples(st.integers(0, 3), st.integers(0, 5)),  # reader, records it may take
        ),
        max_size=60,
    ),
)
def test_every_reader_gets_every_record_in_order(num_readers, steps):
    with ring(num_readers=num_readers) as (writer, readers):
        due = [deque[bytes]() for _ in readers]
        for step in steps:
            match step:
                case bytes():
                    if writer.try_write(step):
                        for queue in due:
                            queue.append(step)
                    else:
                        assert max(map(ring_bytes, due)) + ring_bytes([step]) > CAPACITY
                case reader, count if reader < num_readers:
                    for _ in range(count):
                        record = readers[reader].read(timeout_s=0)
                        assert record == (due[reader].popleft() if due[reader] else None)
        for reader, queue in zip(readers, due, strict=True):
            assert [*reader.read_ready(), *reader.read_ready()] == list(queue)


@given(
    num_readers=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 5 * CAPACITY), max_size=8),
    looks=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40),
    given_up=st.sets(st.integers(0, 7)),
)
def test_records_of_any_length_arrive_whole_and_those_given_up_do_not(
    num_readers, lengths, looks, given_up
):
    """Readers look when they like, with either way to read, and at last until all is taken."""
    records = [bytes([i]) * length for i, length in enumerate(lengths)]
    with ring(num_readers=num_readers) as (writer, readers):
        got: list[list[bytes]] = [[] for _ in readers]
        sent = []

        def look(reader: int, *, at_all: bool) -> None:
            ready = readers[reader].read_ready() if at_all else [readers[reader].read(timeout_s=0)]
            got[reader] += [record for record in ready if record is not None]

        turns = iter(looks)
        for i, record in enumerate(records):
            for reader, at_all in turns:
                if (is_out := writer.try_write(record)) or i in given_up:
                    break
                look(reader % num_readers, at_all=at_all)
            else:
                while not (is_out := writer.try_write(record)) and i not in given_up:
                    for reader in range(num_readers):
                        look(reader, at_all=True)
            sent += [record] if is_out else []
        for reader in range(num_readers):
            for _ in range(len(records) + 1):
                look(reader, at_all=True)
        assert got == [sent] * num_readers


def test_a_record_many_times_as_large_as_the_ring_passes_it_between_threads():
    record = bytes(range(256)) * 500
    with ring(num_readers=2) as (writer, readers), ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(reader.read, timeout_s=5) for reader in readers]
        writer.write(record, timeout_s=5)
        assert [read.result() == record for read in reads] == [True, True]


def test_a_writer_that_gives_up_a_record_can_still_send_others():
    with ring() as (writer, [reader]):
        with pytest.raises(RankError, match="left no space for a record of 1000 bytes"):
            writer.write(bytes(1000), timeout_s=0)
        assert reader.read_ready() == []
        writer.write(b"last words", timeout_s=0)
        assert reader.read_ready() == [b"last words"]


def test_empty_records_stop_at_the_doorbells_bound_and_go_on_after_a_read():
    with ring(capacity=1 << 20) as (writer, [reader]):
        assert all(writer.try_write(b"") for _ in range(MAX_PARTS))
        assert not writer.try_write(b"")
        assert reader.read(timeout_s=0) == b""
        assert writer.try_write(b"")
        assert len(reader.read_ready()) == MAX_PARTS - 1
        assert len(reader.read_ready()) == 1


def test_a_writer_that_finds_no_space_in_time_names_ring_and_reader():
    with ring(num_readers=2) as (writer, readers):
        writer.write(bytes(112), timeout_s=0)
        writer.write(bytes(112), timeout_s=0)
        readers[0].read_ready()
        with pytest.raises(RankError, match=r"ring ring: reader 1 left no space .* within 0\.05 s"):
            writer.write(b"x", timeout_s=0.05)


def test_a_read_that_times_out_gives_none():
    with ring() as (_, [reader]):
        assert reader.read(timeout_s=0.01) is None


def test_what_was_published_is_read_before_the_writers_end_is_told(tmp_path):
    create_ring(tmp_path / "ring", capacity=CAPACITY, num_readers=1)
    reader, writer = RingReader(tmp_path / "ring"), RingWriter(tmp_path / "ring")
    writer.write(b"last words", timeout_s=0)
    writer.close()
    assert reader.read_ready() == [b"last words"]
    with pytest.raises(RankError, match="its writer is gone"):
        reader.read_ready()
    with pytest.raises(RankError, match="its writer is gone"):
        reader.read(timeout_s=None)
    reader.close()


def test_a_writer_notices_that_a_reader_has_closed(tmp_path):
    path = tmp_path / "steps"
    create_ring(path, capacity=CAPACITY, num_readers=2)
    readers = [RingReader(path, reader) for reader in range(2)]
    writer = RingWriter(path)
    readers[1].close()
    with pytest.raises(RankError, match="ring steps: reader 1 is gone"):
        writer.write(b"x", timeout_s=0)


def test_a_record_that_is_not_the_expected_one_is_torn():
    with ring() as (writer, [reader]):
        writer.write(b"x", timeout_s=0)
        writer._data[0] = 7
        with pytest.raises(RankError, match="torn: part 7 of 1 bytes where part 0 was expected"):
            reader.read(timeout_s=0)


def test_opening_before_creation_is_a_named_error(tmp_path):
    with pytest.raises(RankError, match="cannot be opened"):
        RingReader(tmp_path / "ring")
    with pytest.raises(RankError, match="cannot be opened"):
        RingWriter(tmp_path / "ring")


def test_writing_to_a_ring_that_nobody_reads_is_a_named_error(tmp_path):
    create_ring(tmp_path / "ring", capacity=CAPACITY, num_readers=1)
    with pytest.raises(RankError, match="its reader has not opened it"):
        RingWriter(tmp_path / "ring")


def test_a_file_that_is_no_ring_is_refused(tmp_path):
    (tmp_path / "ring").write_bytes(bytes(1000))
    with pytest.raises(RankError, match="not a ring"):
        RingReader(tmp_path / "ring")


def test_a_ring_that_does_not_fit_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(RankError, match="cannot reserve"):
        create_ring(tmp_path / "ring", capacity=1 << 60, num_readers=1)
    assert list(tmp_path.iterdir()) == []


def test_open_ends_go_on_when_the_files_are_removed(tmp_path):
    path = tmp_path / "out.1"
    create_ring(tmp_path / "out.10", capacity=CAPACITY, num_readers=1)
    create_ring(path, capacity=CAPACITY, num_readers=1)
    reader, writer = RingReader(path), RingWriter(path)
    remove_ring(path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "out.10",
        "out.10.bell.0",
        "out.10.credit.0",
    }
    writer.write(b"x", timeout_s=0)
    assert reader.read(timeout_s=0) == b"x"
    writer.close()
    reader.close()


async def test_an_outlet_keeps_the_order_of_what_has_to_wait():
    with ring(num_readers=2) as (writer, readers):
        outlet = Outlet(writer, timeout_s=5)
        flushing = asyncio.create_task(outlet.run())
        records = [bytes([i]) * (900 if i % 5 == 1 else 100) for i in range(20)]
        for record in records:
            outlet.send(record)
        for reader in readers:
            await asyncio.sleep(0)
            assert reader.read(timeout_s=0) == records[0]
        got: list[list[bytes]] = [[records[0]], [records[0]]]
        while min(map(len, got)) < len(records):
            for reader, taken in zip(readers, got, strict=True):
                taken.extend(reader.read_ready())
            await asyncio.sleep(0)
        assert got == [records, records]
        flushing.cancel()


async def test_an_outlet_whose_readers_stall_fails_by_name():
    with ring() as (writer, _):
        outlet = Outlet(writer, timeout_s=0.05)
        for _ in range(4):
            outlet.send(bytes(100))
        with pytest.raises(RankError, match="reader 0 left no space"):
            await outlet.run()
