"""TLS of gRPC: between processes of a cluster, each of which shows a certificate, and in public.

Members of a cluster show one certificate, whose name is ``MEMBER``: they are known by the CA that
signed it and not by their addresses, which come and go.
"""

from pathlib import Path

import grpc

from pdserve.core.cluster_access import MutualTls
from pdserve.core.errors import ConfigError

MEMBER = "pdserve-cluster"


def channel_credentials(tls: MutualTls) -> grpc.ChannelCredentials:
    """Of who calls another member. Raises ConfigError naming the file that cannot be read."""
    return grpc.ssl_channel_credentials(
        _read("cluster_ca", tls.ca),
        _read("cluster_key", tls.key),
        _read("cluster_certificate", tls.certificate),
    )


def member_options() -> tuple[tuple[str, str], ...]:
    """Options of a channel: who answers has to be a member, whatever its address."""
    return (("grpc.ssl_target_name_override", MEMBER),)


def server_credentials(tls: MutualTls) -> grpc.ServerCredentials:
    """Of a member that is called: no certificate of the CA, no connection."""
    pair = (_read("cluster_key", tls.key), _read("cluster_certificate", tls.certificate))
    return grpc.ssl_server_credentials(
        [pair], root_certificates=_read("cluster_ca", tls.ca), require_client_auth=True
    )


def public_credentials(certificate: str, key: str) -> grpc.ServerCredentials:
    """Of a server that anybody may connect to. Raises ConfigError, likewise."""
    return grpc.ssl_server_credentials(
        [(_read("tls_key", key), _read("tls_certificate", certificate))]
    )


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"security.{key}: {path}: cannot be read: {error.strerror}") from error
