"""What all processes of one cluster have in common."""

from dataclasses import dataclass
from pathlib import Path

from pdserve.cluster.resolve import ResolvedCluster
from pdserve.core.model_identity import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One run of one cluster. ``run_token`` names its directories on every host."""

    cluster: ResolvedCluster
    model_dir: Path
    model_identity: ModelIdentity  # of what is in it, on every host
    run_token: str
    log_folder: str  # below each host's log directory
    admin_token: str  # who has it may give orders
