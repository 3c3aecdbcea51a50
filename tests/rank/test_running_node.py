"""Ports and lifetime of a node's server."""

import socket

import grpc
import pytest

from pdserve.core.config import DecodeConfig
from pdserve.core.errors import ConfigError
from pdserve.rank.readiness import Readiness
from pdserve.rank.running_node import start_server
from pdserve.rpc.network import GrpcNetwork
from tests.nodes.specs import make_spec


def nothing(server: grpc.aio.Server) -> None:
    """No service to register."""


@pytest.fixture
def taken():
    """A port that is in use, with a free one behind it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            first.listen()
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            second.close()
            yield port
            return


async def test_a_server_takes_the_first_free_port_of_its_range(taken):
    spec = make_spec("decode-0", DecodeConfig(), port_range=(taken, taken + 1))
    server, address = await start_server(spec, GrpcNetwork(), nothing)
    await server.stop(0)
    assert address.address == f"127.0.0.1:{taken + 1}"
    assert (address.name, address.incarnation) == ("decode-0", "decode-0#1")


async def test_a_range_without_a_free_port_is_an_error_that_names_it(taken):
    spec = make_spec("decode-0", DecodeConfig(), port_range=(taken, taken))
    with pytest.raises(ConfigError, match=f"decode-0.*{taken}"):
        await start_server(spec, GrpcNetwork(), nothing)


async def test_a_change_of_readiness_is_told_at_once_and_the_first_reason_counts():
    readiness = Readiness()
    changes = readiness.changes(period_s=60)
    await anext(changes)
    readiness.lose("first")
    readiness.lose("second")
    await anext(changes)
    assert readiness.problem == "first"
    await changes.aclose()
