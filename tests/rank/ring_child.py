"""A process at one end of a ring, for the ring's tests.

    python -m tests.rank.ring_child read PATH READER  prints the digest of all records to the end
    python -m tests.rank.ring_child write PATH SEED   writes ``records(SEED)``
    python -m tests.rank.ring_child tear PATH         writes one record, half of another, waits

Each prints "open" once its end is open and goes on when it gets a line.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from pdserve.core.errors import RankError
from pdserve.rank.ring import RingReader, RingWriter

NUM_RECORDS = 3000
CAPACITY = 1 << 14


def records(seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(NUM_RECORDS):
        yield rng.randbytes(rng.choice((0, 1, 15, 16, 17, 200, 4000, CAPACITY // 2 - 16, CAPACITY)))


def read(path: Path, reader: int) -> None:
    ring = RingReader(path, reader)
    meet()
    digest = hashlib.sha256()
    while True:
        try:
            record = ring.read(timeout_s=30)
        except RankError:
            break
        assert record is not None
        digest.update(len(record).to_bytes(8, "little") + record)
    print(digest.hexdigest(), flush=True)


def write(path: Path, seed: int) -> None:
    ring = RingWriter(path)
    meet()
    for record in records(seed):
        ring.write(record, timeout_s=30)
    ring.close()


def tear(path: Path) -> None:
    ring = RingWriter(path)
    meet()
    ring.write(b"whole", timeout_s=1)
    ring._data[32:48] = b"half of a record"
    print("torn", flush=True)
    sys.stdin.readline()


def meet() -> None:
    print("open", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["read", path, reader]:
            read(Path(path), int(reader))
        case ["write", path, seed]:
            write(Path(path), int(seed))
        case ["tear", path]:
            tear(Path(path))
