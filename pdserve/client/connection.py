"""How a client reaches a router: its key, and TLS."""

from pathlib import Path

import grpc

from pdserve.core.environment import api_key
from pdserve.core.errors import ConfigError


def metadata(given: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call: the key that is given, else ``$PDSERVE_API_KEY``."""
    key = given or api_key()
    return () if key is None else (("authorization", f"Bearer {key}"),)


def credentials(*, tls: bool, ca_file: str | Path | None) -> grpc.ChannelCredentials | None:
    """Of a channel: trusting the CAs in ``ca_file``, else gRPC's own. None: no TLS.

    Raises ConfigError where the file cannot be read.
    """
    if ca_file is None:
        return grpc.ssl_channel_credentials() if tls else None
    try:
        return grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
    except OSError as error:
        raise ConfigError(f"ca_file: {ca_file}: cannot be read: {error.strerror}") from error
