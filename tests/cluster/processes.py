"""The processes below a process, as /proc has them."""

import time
from collections.abc import Iterable
from pathlib import Path

LISTENING = "0A"  # a state of /proc/net/tcp


def descendants(pid: int) -> dict[int, str]:
    """Process ids below ``pid`` and what they call themselves."""
    found: dict[int, str] = {}
    for child in _children(pid):
        found[child] = _name(child)
        found |= descendants(child)
    return found


def wait_until_gone(pids: dict[int, str], timeout_s: float) -> dict[int, str]:
    """Those that still run after ``timeout_s``. Zombies do not run."""
    deadline_s = time.monotonic() + timeout_s
    while (alive := {pid: name for pid, name in pids.items() if is_running(pid)}) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.1)
    return alive


def listener(pids: Iterable[int], port: int) -> int:
    """The one of ``pids`` that listens on a TCP port."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]  # gRPC's sockets are of the latter
    rows = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    inodes = {
        f"socket:[{row[9]}]"
        for row in rows
        if int(row[1].rpartition(":")[2], 16) == port and row[3] == LISTENING
    }
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if fd.is_symlink() and str(fd.readlink()) in inodes:
                return pid
    raise LookupError(f"none of {list(pids)} listens on port {port}")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except FileNotFoundError:
        return "gone"
