"""Addresses and ports of this host."""

import socket

import grpc
import pytest

from pdserve.cluster.addresses import callable_address, host_address, is_free, settled_ports
from pdserve.core.config import NetworkConfig, RouterConfig
from pdserve.core.errors import ConfigError
from router.grpc_limits import public_options


def test_an_interface_stands_for_its_address() -> None:
    assert host_address(NetworkConfig(interface="lo")) == "127.0.0.1"
    assert host_address(NetworkConfig(host="127.0.0.2")) == "127.0.0.2"


WRONG_HOSTS = ["192.0.2.1", "no-such-host.invalid", f"{'a' * 64}.invalid", "::ffff::"]


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_a_host_that_is_not_this_one_is_refused_by_key(host: str) -> None:
    with pytest.raises(ConfigError, match=f"network.host: .* has no address '{host}'"):
        host_address(NetworkConfig(host=host))


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"network.interface: 'eth77' .* there are .*lo"):
        host_address(NetworkConfig(interface="eth77"))


def test_a_port_is_free_when_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


@pytest.mark.parametrize("host", WRONG_HOSTS)
@pytest.mark.parametrize("ports", [(0, 0), (0, 48211), (48210, 0), (48210, 48211)])
def test_a_host_that_the_router_cannot_listen_on_is_refused(
    host: str, ports: tuple[int, int]
) -> None:
    router = RouterConfig(host=host, http_port=ports[0], grpc_port=ports[1])
    with (
        pytest.raises(ConfigError, match=rf"router.host: cannot listen on '{host}'"),
        settled_ports(router),
    ):
        pass


def test_open_ports_are_chosen_once_and_a_taken_one_is_refused() -> None:
    with settled_ports(RouterConfig(http_port=0, grpc_port=0)) as settled:
        assert settled.http_port > 0
        assert settled.grpc_port > 0
        with settled_ports(settled) as again:
            assert again == settled
    with (
        socket.create_server(("127.0.0.1", settled.grpc_port)),
        pytest.raises(ConfigError, match=r"--set router\.grpc_port=PORT"),
        settled_ports(settled),
    ):
        pass


def test_a_chosen_port_is_given_to_nobody_else_before_the_router_listens() -> None:
    """An agent of another cluster took one within the seconds that Ray needs to start."""
    with settled_ports(RouterConfig(http_port=0, grpc_port=0)) as settled:
        for port in (settled.http_port, settled.grpc_port):
            with (
                socket.socket() as other,
                pytest.raises(OSError, match="already in use"),
            ):
                other.bind(("127.0.0.1", port))
        with settled_ports(RouterConfig(http_port=0, grpc_port=0)) as others:
            chosen = {settled.http_port, settled.grpc_port, others.http_port, others.grpc_port}
            assert len(chosen) == 4


async def test_servers_listen_on_ports_that_are_held_for_them() -> None:
    with settled_ports(RouterConfig(http_port=0, grpc_port=0)) as settled:
        server = grpc.aio.server(options=public_options(settled.limits))
        assert server.add_insecure_port(f"127.0.0.1:{settled.grpc_port}") == settled.grpc_port
        await server.start()
        with socket.create_server(("127.0.0.1", settled.http_port)):
            assert not is_free("127.0.0.1", settled.http_port)
            assert not is_free("127.0.0.1", settled.grpc_port)
        await server.stop(None)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:8000"),
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("router.example", "router.example:8000"),
    ],
)
def test_what_listens_everywhere_is_called_here(host: str, address: str) -> None:
    assert callable_address(host, 8000) == address
