"""What the processes of one incarnation of a node are told, and where they meet.

Owns the directory in shared memory that front and ranks share; whichever of them comes first makes
it. What is in it is `pdserve/rank`'s business.
"""

import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.site import Site

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One start of one node."""

    id: str
    site: Site
    plan: NodePlan
    start_timeout_s: float
    step_timeout_s: float

    def make_run_dir(self) -> Path:
        """The directory in which this incarnation's processes meet, on the host of the caller."""
        run_dir = shared_dir(self.site.run_token) / self.id
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return run_dir


def new_incarnation_id(node: str) -> str:
    """Names one start of a node, for ever."""
    return f"{node}-{secrets.token_hex(4)}"


def shared_dir(run_token: str) -> Path:
    """The directory of one cluster's processes on this host: in memory where that is possible."""
    in_memory = os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    root = _SHARED_MEMORY if in_memory else Path(tempfile.gettempdir())
    return root / f"pdserve-{run_token}"
