"""What a sender lends, frame by frame, in a small file that both processes map.

    sender                                        receiver
      lend(seq), then the frame is announced ───>   copies the frame's blocks
      take_back(seq), then the blocks are free      check(seq) when the copy is done

A receiver that finds the lease gone has copied what may be something else, and drops it. So a
sender gives its blocks away at once, whatever the receiver is doing or when it will wake up, and a
receiver that was stopped for an hour does not pass on another request's KV. A word holds the number
of the frame that its place is lent to, plus one. A sender that closes the link says so in all of
them: that may be seen here before the stream tells it. One that dies leaves its leases as they are,
and its memory too while somebody maps it.
"""

import mmap
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from pdserve.core.errors import LinkDownError, TransferError

NUM_PLACES = 64  # more than a window of frames
WORD_BYTES = 8  # written and read as one
FREE, CLOSED = 0, 2 ** (8 * WORD_BYTES) - 1  # words that lend no frame
SIZE = NUM_PLACES * WORD_BYTES


class Leases:
    """The sender's end. Owns the file in ``directory`` until both sides have it.

    The memory is reserved here: where there is none this is a LinkDownError now, not a SIGBUS at
    the first word. What a process that is killed leaves there goes with the directory.
    """

    def __init__(self, directory: Path) -> None:
        try:
            handle, self.path = tempfile.mkstemp(prefix="pdserve-kv-", dir=directory)
            with ExitStack() as undo:
                undo.callback(self.opened)
                with os.fdopen(handle, "r+b"):
                    os.posix_fallocate(handle, 0, SIZE)
                    self._words = memoryview(mmap.mmap(handle, SIZE)).cast("Q")
                undo.pop_all()
        except OSError as error:
            raise LinkDownError(f"leases can not be made in {directory}: {error}") from error

    def lend(self, seq: int) -> None:
        """The blocks of this frame stay as they are, until it is taken back."""
        self._words[seq % NUM_PLACES] = seq + 1

    def take_back(self, seq: int) -> None:
        """The frame is answered, or its blocks are needed."""
        if self._words[seq % NUM_PLACES] == seq + 1:
            self._words[seq % NUM_PLACES] = FREE

    def opened(self) -> None:
        """The receiver has the file: nobody else needs its name."""
        Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Take everything back: the link is closed."""
        for place in range(NUM_PLACES):
            self._words[place] = CLOSED
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
        except (ValueError, OSError) as error:
            raise LinkDownError(f"{path} holds no leases: {error}") from error
        finally:
            os.close(handle)

    def check(self, seq: int) -> None:
        """Raises TransferError if the frame was taken back, LinkDownError if the link is closed."""
        word = self._words[seq % NUM_PLACES]
        if word == CLOSED:
            raise LinkDownError("connection lost: the sender closed the link")
        if word != seq + 1:
            raise TransferError("the sender took back what it had lent")
