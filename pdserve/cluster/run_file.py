"""How a command finds the clusters that run on this machine: one file each in the user's cache.

    CACHE/run/NAME.json    where to call, whom to ask; there as long as the cluster serves
    CACHE/run/NAME.lock    locked by the process that serves; free: whatever NAME.json says is stale

The lock, not a process id, says whether a cluster lives: the system frees it whatever ended the
process, and ids are used again. Hosts and containers can share a cache: each finds its own clusters
alone, since an address may mean nothing elsewhere.
"""

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pdserve.cluster.process_log import PREVIOUS
from pdserve.core.environment import cache_dir
from pdserve.core.errors import ConfigError

DEFAULT_NAME = "pdserve"
MAX_UNNAMED = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One running cluster. ``nodes``: the role of each, by name. ``leftovers``: directories that a
    killed one leaves behind.
    """

    name: str
    pid: int
    host: str = field(default_factory=socket.gethostname)
    http_url: str | None = None  # None: it is still starting
    grpc_address: str | None = None
    certificate: str | None = None  # the router's, where it speaks TLS
    nodes: dict[str, str] = field(default_factory=dict)
    log_dir: str
    run_token: str
    admin_token: str  # for the router's orders; the file is its owner's alone
    leftovers: tuple[str, ...]


def run_folder() -> Path:
    """Where run files lie."""
    return cache_dir() / "run"


class Claim:
    """The right to a cluster's name, held until ``release``."""

    def __init__(self, folder: Path, name: str, lock_fd: int) -> None:
        self.name = name
        self._path = folder / f"{name}.json"
        self._lock_path = folder / f"{name}.lock"
        self._lock_fd = lock_fd
        _clean(self._path)

    def publish(self, record: RunRecord) -> None:
        """Write or replace the run file; readers see the old one or the new one."""
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        fresh.replace(self._path)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def claim(folder: Path, name: str | None) -> Claim:
    """Take ``name``, or the first free default name for None.

    Raises ConfigError where a cluster of that name runs, the name is no file's, or the cache is not
    for us to write.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(f"--name: {name!r}: letters, digits, '.', '_' and '-' are allowed")
    if name is not None and name.endswith(PREVIOUS):
        raise ConfigError(f"--name: {name!r}: {PREVIOUS!r} is the end of the name of kept logs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for candidate in [name] if name is not None else _default_names():
            if (lock_fd := _lock(folder / f"{candidate}.lock", fcntl.LOCK_EX)) is not None:
                return Claim(folder, candidate, lock_fd)
    except OSError as error:
        raise ConfigError(f"PDSERVE_CACHE: the cache cannot be written: {error}") from error
    raise ConfigError(f"--name: a cluster named {name or DEFAULT_NAME!r} runs already")


def running(folder: Path) -> list[RunRecord]:
    """All clusters that run on this host, by name. Stale files are removed on the way."""
    host = socket.gethostname()
    records = []
    for path in sorted(folder.glob("*.json")):
        with _probe(path.with_suffix(".lock")) as stale:
            if stale:
                _clean(path)
            elif (record := _read(path)) is not None and record.host == host:
                records.append(record)
    return records


def _default_names() -> Iterable[str]:
    yield DEFAULT_NAME
    for i in range(2, MAX_UNNAMED):
        yield f"{DEFAULT_NAME}-{i}"


def _lock(path: Path, kind: int) -> int | None:
    """An open, locked file, or None where somebody else holds the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not _is_still(path, fd):  # removed by its last owner between our open and our lock
        os.close(fd)
        return _lock(path, kind)
    return fd


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextmanager
def _probe(lock_path: Path) -> Iterator[bool]:
    """Whether nobody serves under this lock; nobody can start to inside the block."""
    fd = _lock(lock_path, fcntl.LOCK_SH)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            lock_path.unlink(missing_ok=True)
            os.close(fd)


def _read(path: Path) -> RunRecord | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        whole = {"nodes": dict(data["nodes"]), "leftovers": tuple(data["leftovers"])}
        return RunRecord(**{**data, **whole})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it ended just now, or another version of pdserve wrote it


def _clean(path: Path) -> None:
    """Remove a run file that nobody owns any more, and the directories that its cluster left."""
    record = _read(path)
    for leftover in record.leftovers if record is not None else ():
        shutil.rmtree(leftover, ignore_errors=True)
    path.unlink(missing_ok=True)
