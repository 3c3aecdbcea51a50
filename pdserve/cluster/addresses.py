"""Addresses and ports of this host: the one to announce, and which ports are free."""

import errno
import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from pdserve.core.config import NetworkConfig, RouterConfig
from pdserve.core.errors import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_NAME_BYTES = 15
_ADDRESS = slice(20, 24)  # of the answer
_NO_ADDRESS = (OSError, ValueError)  # what sockets raise of a host; ValueError: of what is no name


def host_address(network: NetworkConfig) -> str:
    """The address that this host's processes bind and announce. Raises ConfigError."""
    if network.interface is None:
        return _own_address(network.host)
    name = network.interface.encode()[:_NAME_BYTES]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"network.interface: {network.interface!r} has no IPv4 address on "
                f"{socket.gethostname()} ({error.strerror}); there are {known}"
            ) from error
    return socket.inet_ntoa(answer[_ADDRESS])


def callable_address(host: str, port: int) -> str:
    """``host:port`` to call from this host what listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def settled_ports(router: RouterConfig) -> Iterator[RouterConfig]:
    """The router's section with both ports free and known: a router made anew keeps them.

    Ports chosen here are nobody else's inside the block: between the choice and the router's start
    lies that of Ray. Raises ConfigError where a port is taken or the host is not ours.
    """
    for key in ("http_port", "grpc_port"):
        port = getattr(router, key)
        if port and not is_free(router.host, port):
            raise ConfigError(
                f"router.{key}: {router.host}:{port} is taken; choose another port by "
                f"`--set router.{key}=PORT`, or 0 for any"
            )
    with ExitStack() as held:
        try:
            settled = replace(
                router,
                http_port=router.http_port or _hold_port(router.host, held),
                grpc_port=router.grpc_port or _hold_port(router.host, held),
            )
        except _NO_ADDRESS as error:
            raise _cannot_listen(router.host, error) from error
        yield settled


def _own_address(host: str) -> str:
    try:
        with ExitStack() as held:
            _hold_port(host, held)
    except _NO_ADDRESS as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"network.host: {socket.gethostname()} has no address {host!r} ({reason}); "
            "give one that it has, or network.interface"
        ) from error
    return host


def _hold_port(host: str, held: ExitStack) -> int:
    """A port that, while it is held, the system gives to nobody, but a server may listen on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server sets it
    holder.bind((host, 0))
    port = holder.getsockname()[1]
    assert isinstance(port, int)
    return port


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Raises ConfigError where the host is not ours."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                raise
    except _NO_ADDRESS as error:
        raise _cannot_listen(host, error) from error
    return True


def _cannot_listen(host: str, error: Exception) -> ConfigError:
    return ConfigError(f"router.host: cannot listen on {host!r}: {error}")
