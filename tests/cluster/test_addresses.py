"""Addresses and ports of this host."""

import socket

import pytest

from pdserve.cluster.addresses import callable_address, host_address, is_free, settled_ports
from pdserve.core.config import NetworkConfig, RouterConfig
from pdserve.core.errors import ConfigError


def test_an_interface_stands_for_its_address() -> None:
    assert host_address(NetworkConfig(interface="lo")) == "127.0.0.1"
    assert host_address(NetworkConfig(host="127.0.0.2")) == "127.0.0.2"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])  # for documents alone
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


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router.host: cannot listen on '192.0.2.77'"):
        is_free("192.0.2.77", 8000)


def test_open_ports_are_chosen_once_and_a_taken_one_is_refused() -> None:
    settled = settled_ports(RouterConfig(http_port=0, grpc_port=0))
    assert settled.http_port > 0
    assert settled.grpc_port > 0
    assert settled_ports(settled) == settled
    with (
        socket.create_server(("127.0.0.1", settled.grpc_port)),
        pytest.raises(ConfigError, match=r"--set router\.grpc_port=PORT"),
    ):
        settled_ports(settled)


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
