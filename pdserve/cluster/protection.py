"""What protects a cluster: its secret, its API keys and its certificates, found before it starts.

Secrets come from files or the environment, never from the command line; what is taken from the
environment is gone from it before other processes start.
"""

import ipaddress
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from pdserve.core.api_keys import ApiKey, parse_keys
from pdserve.core.cluster_access import ClusterAccess, MutualTls
from pdserve.core.config import ClusterConfig
from pdserve.core.environment import take_secret
from pdserve.core.errors import ConfigError
from pdserve.core.security_config import SecurityConfig

SECRET_VARIABLE, KEYS_VARIABLE = "PDSERVE_CLUSTER_SECRET", "PDSERVE_API_KEYS"
LEAST_SECRET_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """``secret``: None where each host reads ``security.cluster_secret_file`` itself.

    ``api_keys``: those of the environment.
    """

    secret: str | None = field(repr=False)
    api_keys: tuple[ApiKey, ...] | None = None

    def access(self, security: SecurityConfig) -> ClusterAccess:
        """To the other processes, from this host. Raises ConfigError where the file is missing."""
        secret = self.secret
        if secret is None:
            assert security.cluster_secret_file is not None
            secret = _read_secret(Path(security.cluster_secret_file))
        return ClusterAccess(secret=secret, tls=_mutual_tls(security))


def settled(security: SecurityConfig) -> SecurityConfig:
    """With whole paths, for processes that run elsewhere. Raises ConfigError for what cannot be
    read here.
    """
    whole = {}
    for one in fields(security):
        if (given := getattr(security, one.name)) is not None:
            path = Path(given).expanduser().absolute()
            _read(f"security.{one.name}", path)
            whole[one.name] = str(path)
    return replace(security, **whole)


def find_protection(security: SecurityConfig) -> Protection:
    """Draws a secret where none is given. Raises ConfigError for what is none."""
    keys = take_secret(KEYS_VARIABLE)
    if (file := security.api_keys_file) is not None:
        parse_keys(_read("security.api_keys_file", Path(file)), f"security.api_keys_file: {file}")
    return Protection(
        secret=_secret(security, take_secret(SECRET_VARIABLE)),
        api_keys=None if keys is None else parse_keys(keys, KEYS_VARIABLE),
    )


def gaps(config: ClusterConfig, protection: Protection, transport: str) -> Iterator[str]:
    """What whoever starts it should know is open, a line each."""
    security, router = config.security, config.router
    need_keys = protection.api_keys is not None or security.api_keys_file is not None
    if not _is_loopback(router.host):
        if not need_keys:
            yield (
                f"router.host {router.host} opens the router to the network, and no API key is "
                "asked: whoever reaches it may call; `pdserve keys add`"
            )
        elif security.tls_certificate is None:
            yield (
                f"router.host {router.host}: API keys and prompts cross the network in the clear; "
                "`pdserve certs`"
            )
    nodes_are_open = config.network.interface is not None or not _is_loopback(config.network.host)
    if nodes_are_open and security.cluster_ca is None:
        yield "prompts and KV between nodes are not encrypted: keep their network private"
    elif nodes_are_open and transport not in ("grpc", "cuda_ipc"):
        yield f"KV over {transport} is not encrypted: keep the nodes' network private"


def _secret(security: SecurityConfig, given: str | None) -> str | None:
    if security.cluster_secret_file is not None:
        if given is not None:
            raise ConfigError(
                f"security.cluster_secret_file: {SECRET_VARIABLE} is set too; give one of them"
            )
        _read_secret(Path(security.cluster_secret_file))
        return None
    if given is None:
        return secrets.token_hex(LEAST_SECRET_CHARS)
    return _checked(SECRET_VARIABLE, given)


def _read_secret(path: Path) -> str:
    key = "security.cluster_secret_file"
    text = _read(key, path)
    if path.stat().st_mode & stat.S_IRWXO:
        raise ConfigError(f"{key}: {path}: everybody may read it; `chmod 600` it")
    return _checked(f"{key}: {path}", text.strip())


def _checked(where: str, secret: str) -> str:
    if len(secret) < LEAST_SECRET_CHARS:
        raise ConfigError(
            f"{where}: it has {len(secret)} characters, at least {LEAST_SECRET_CHARS} are needed"
        )
    return secret


def _mutual_tls(security: SecurityConfig) -> MutualTls | None:
    ca, certificate = security.cluster_ca, security.cluster_certificate
    if ca is None or certificate is None or security.cluster_key is None:
        return None
    return MutualTls(ca=ca, certificate=certificate, key=security.cluster_key)


def _read(key: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{key}: {path}: cannot be read: {reason}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
