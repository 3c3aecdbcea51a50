"""The directory in which one start of a node's front and ranks meet: names, and where to put it.

Owns the names; who makes and removes which file is told where it is used. A directory serves one
incarnation of a node and is removed by whoever made it.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside ``root``."""

    root: Path

    @property
    def steps(self) -> Path:
        """The ring of batches: front → main threads of all ranks."""
        return self.root / "steps"

    @property
    def kv(self) -> Path:
        """The ring of KV commands: front → KV threads of all ranks."""
        return self.root / "kv"

    def out(self, rank: int) -> Path:
        """The ring of outputs and KV events: rank → front."""
        return self.root / f"out.{rank}"

    def lifeline(self, rank: int) -> Path:
        """The FIFO whose other end is open as long as the front lives."""
        return self.root / f"lifeline.{rank}"

    @property
    def tp_store(self) -> Path:
        """Where the ranks meet to make their tensor-parallel group."""
        return self.root / "tp-store"


def new_run_dir(name: str) -> Path:
    """Make a fresh directory in shared memory, or where temporary files go if there is none."""
    root = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"pdserve-{name}-", dir=root))
