"""The ``security`` section of the cluster file: who may call, and what is encrypted.

Paths only; what is in the files is read by the processes that need it.
"""

from dataclasses import dataclass

from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Off unless said otherwise, but for the cluster's secret, which is always on."""

    api_keys_file: str | None = None  # who may call; read by the router, again when it changes
    tls_certificate: str | None = None  # PEM, with its chain: HTTP and gRPC are TLS
    tls_key: str | None = None
    cluster_secret_file: str | None = None  # on each host; default: drawn at each start
    cluster_ca: str | None = None  # PEM, on each host: mutual TLS between router and nodes
    cluster_certificate: str | None = None
    cluster_key: str | None = None

    def __post_init__(self) -> None:
        self._check_whole("tls_certificate", "tls_key")
        self._check_whole("cluster_ca", "cluster_certificate", "cluster_key")

    @property
    def scheme(self) -> str:
        """Of the router's URLs."""
        return "http" if self.tls_certificate is None else "https"

    def _check_whole(self, *keys: str) -> None:
        missing = [key for key in keys if getattr(self, key) is None]
        if missing and len(missing) < len(keys):
            raise ConfigError(
                f"security.{missing[0]}: got none; give all or none of "
                + ", ".join(f"security.{key}" for key in keys)
            )
