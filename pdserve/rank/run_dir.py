"""The names in the directory in which one start of a node's front and ranks meet.

Who makes and removes which file is told where it is used. A directory serves one incarnation of a
node, is best in shared memory, and is made and removed by the owner of the processes. The ranks' KV
links have files there too, under names that they choose, for as long as it takes to open them.
"""

from dataclasses import dataclass
from pathlib import Path


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
