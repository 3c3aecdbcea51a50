"""Certificates as `pdserve certs` makes them."""

import datetime
from pathlib import Path

from pdserve.core.cluster_access import ClusterAccess, MutualTls
from pdserve.core.security_config import SecurityConfig
from pdserve.security.certificates import development_files
from pdserve.security.secret_file import write_new

SECRET = "s3cret of this cluster"


def write_files(folder: Path) -> Path:
    """All files of a cluster, in a folder of their own."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)
    for file in development_files((), days=1, now=now):
        write_new(folder / file.name, file.content, is_secret=file.is_secret)
    return folder


def public(folder: Path) -> SecurityConfig:
    """The router's."""
    return SecurityConfig(
        tls_certificate=str(folder / "router.pem"), tls_key=str(folder / "router-key.pem")
    )


def member(folder: Path, *, ca: Path | None = None, name: str = "cluster") -> ClusterAccess:
    """Of a process of the cluster; ``ca``: the folder of the CA that it trusts."""
    return ClusterAccess(
        secret=SECRET,
        tls=MutualTls(
            ca=str((ca or folder) / "cluster-ca.pem"),
            certificate=str(folder / f"{name}.pem"),
            key=str(folder / f"{name}-key.pem"),
        ),
    )
