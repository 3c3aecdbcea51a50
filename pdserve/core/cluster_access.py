"""What a process needs to speak with the others of its cluster."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls:
    """PEM files of this host. Who has a certificate of ``ca`` belongs to the cluster."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """The cluster's secret, which every session has to prove, and how connections are encrypted.

    ``tls``: None sends all in the clear.
    """

    secret: str = field(repr=False)
    tls: MutualTls | None = None
