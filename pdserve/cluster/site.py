"""What all processes of one cluster have in common."""

from dataclasses import dataclass, field
from pathlib import Path

from pdserve.cluster.protection import Protection
from pdserve.cluster.resolve import ResolvedCluster
from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.model_identity import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One run of one cluster. ``run_token`` names its directories on every host."""

    cluster: ResolvedCluster
    model_dir: Path
    model_identity: ModelIdentity  # of what is in it, on every host
    run_token: str
    log_folder: str  # below each host's log directory
    admin_token: str = field(repr=False)  # who has it may give orders
    protection: Protection

    @property
    def access(self) -> ClusterAccess:
        """To the other processes, from the host of the caller. Raises ConfigError."""
        return self.protection.access(self.cluster.config.security)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStart:
    """What a router is started with. ``was_ready``: the cluster, once, by an earlier router."""

    site: Site
    was_ready: bool
