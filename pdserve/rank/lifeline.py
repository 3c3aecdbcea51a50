"""How a rank knows that its front is there, and that it is gone: one FIFO for each rank.

The front writes one byte when everything a rank opens exists, and keeps its end open as long as it
lives. Either side may come first: both make the FIFO where it is missing. The kernel closes the
front's end whatever it dies of; the rank sees a hang-up.
"""

import os
import select
from pathlib import Path

from pdserve.core.errors import RankError


class FrontLifeline:
    """The front's end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        _make(path)
        # Read-write: opening does not depend on the rank, and the byte waits for it.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def release(self) -> None:
        """Let the rank in: all that it opens exists now."""
        os.write(self._fd, b"\0")

    def close(self) -> None:
        """Let the rank go; it takes this for the front's end. May be called again."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            self._path.unlink(missing_ok=True)


class RankLifeline:
    """The rank's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC)

    def wait_for_end(self) -> bool:
        """Block until the front is gone (True) or ``wake`` was called (False)."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        return self._woken not in ready

    def wake(self) -> None:
        """End ``wait_for_end`` in another thread."""
        os.write(self._wake, b"\0")

    def close(self) -> None:
        for fd in (self._fd, self._woken, self._wake):
            os.close(fd)


def wait_for_front(path: Path, *, timeout_s: float) -> RankLifeline:
    """Wait until all that a rank opens exists. RankError if it does not within ``timeout_s``."""
    _make(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ready = poll.poll(timeout_s * 1000)
    if ready and os.read(fd, 1):
        return RankLifeline(fd)
    os.close(fd)
    problem = "ended" if ready else f"did not start within {timeout_s} s"
    raise RankError(f"{path}: the front {problem}")


def _make(path: Path) -> None:
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise RankError(f"{path}: cannot be made: {error}") from error
