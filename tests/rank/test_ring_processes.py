"""The ring between real processes: every record arrives, and deaths are noticed."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve.core.errors import RankError
from pdserve.rank.ring import RingReader, RingWriter, create_ring
from tests.rank.ring_child import CAPACITY, records


class Child:
    """A ``ring_child`` that has opened its end of the ring."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank.ring_child", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "open"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


def test_three_readers_in_processes_of_their_own_get_everything(path):
    create_ring(path, capacity=CAPACITY, num_readers=3)
    readers = [Child("read", path, reader) for reader in range(3)]
    writer = Child("write", path, 42)
    for child in (*readers, writer):
        child.go()
    digest = hashlib.sha256()
    for record in records(42):
        digest.update(len(record).to_bytes(8, "little") + record)
    assert {reader.line() for reader in readers} == {digest.hexdigest()}
    for child in (*readers, writer):
        child.end()


def test_a_writer_killed_in_the_middle_of_a_record_shows_as_gone(path):
    create_ring(path, capacity=CAPACITY, num_readers=1)
    reader = RingReader(path)
    child = Child("tear", path)
    child.go()
    assert child.line() == "torn"
    child.end()
    assert reader.read(timeout_s=1) == b"whole"
    with pytest.raises(RankError, match="its writer is gone"):
        reader.read(timeout_s=None)
    reader.close()


def test_a_writer_waiting_for_space_notices_that_the_reader_was_killed(path):
    create_ring(path, capacity=CAPACITY, num_readers=1)
    child = Child("read", path, 0)  # waits for our line, reads nothing
    writer = RingWriter(path)
    writer.write(bytes(CAPACITY // 2 - 16), timeout_s=1)
    writer.write(bytes(CAPACITY // 2 - 16), timeout_s=1)
    start_s = time.monotonic()
    child.process.kill()
    with pytest.raises(RankError, match="reader 0 is gone"):
        writer.write(b"x", timeout_s=30)
    assert time.monotonic() - start_s < 1
    child.end()
    writer.close()
