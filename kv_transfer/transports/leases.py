"""What a sender lends, frame by frame, in a small file that both processes map.

    sender                                        receiver
      lend(seq), then the frame is announced ───>   copies the frame's blocks
      take_back(seq), then the blocks are free      asks holds(seq) when the copy is done

A receiver that finds the lease gone has copied what may be something else, and drops it. So a
sender gives its blocks away at once, whatever the receiver is doing or when it will wake up, and a
receiver that was stopped for an hour does not pass on another request's KV. A word holds the number
of the frame that its place is lent to, plus one. A sender that dies leaves its leases as they are,
and its memory too while somebody maps it.
"""

import mmap
import os
import tempfile
from pathlib import Path

from pdserve.core.errors import LinkDownError

NUM_PLACES = 64  # more than a window of frames
WORD_BYTES = 8  # written and read as one
SIZE = NUM_PLACES * WORD_BYTES
SHARED_MEMORY = Path("/dev/shm")  # memory that other processes of the host can map


class Leases:
    """The sender's end. Owns the file until both sides have it."""

    def __init__(self) -> None:
        directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        handle, self.path = tempfile.mkstemp(prefix="pdserve-kv-", dir=directory)
        os.ftruncate(handle, SIZE)
        self._words = memoryview(mmap.mmap(handle, SIZE)).cast("Q")
        os.close(handle)

    def lend(self, seq: int) -> None:
        """The blocks of this frame stay as they are, until it is taken back."""
        self._words[seq % NUM_PLACES] = seq + 1

    def take_back(self, seq: int) -> None:
        """The frame is answered, or its blocks are needed."""
        if self._words[seq % NUM_PLACES] == seq + 1:
            self._words[seq % NUM_PLACES] = 0

    def opened(self) -> None:
        """The receiver has the file: nobody else needs its name."""
        Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Take everything back."""
        for place in range(NUM_PLACES):
            self._words[place] = 0
        self.opened()


class LeaseView:
    """The receiver's end. Raises LinkDownError if there is no such file for this process."""

    def __init__(self, path: str) -> None:
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise LinkDownError(
                f"the sender's leases can not be read: {error}; both processes must share /dev/shm"
            ) from error
        try:
            self._words = memoryview(mmap.mmap(handle, SIZE, access=mmap.ACCESS_READ)).cast("Q")
        except ValueError as error:
            raise LinkDownError(f"{path} holds no leases") from error
        finally:
            os.close(handle)

    def holds(self, seq: int) -> bool:
        """The frame has not been taken back."""
        return self._words[seq % NUM_PLACES] == seq + 1
