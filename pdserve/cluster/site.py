"""What all processes of one cluster have in common."""

from dataclasses import dataclass
from pathlib import Path

from pdserve.cluster.resolve import ResolvedCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One run of one cluster. ``run_token`` names its directories on every host."""

    cluster: ResolvedCluster
    model_dir: Path
    run_token: str
    log_folder: str  # below each host's log directory
    admin_token: str  # who has it may give orders
