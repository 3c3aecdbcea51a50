"""What listens for other processes listens on its own address, never on all."""

import asyncio
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
import torch

from kv_transfer.messages import Message, PairOffer
from kv_transfer.transports.grpc_wire import GrpcWire
from kv_transfer.transports.pair import Pair
from kv_transfer.transports.process_group import _GlooGroup
from kv_transfer.transports.transport import LinkSetting, PairMet
from kv_transfer.transports.turns import Turns
from pdserve.core.clock import MonotonicClock
from pdserve.core.cluster_access import ClusterAccess
from pdserve.rpc.network import GrpcNetwork
from tests.nodes.site import Site

ALL = {"0.0.0.0", "::"}
ACCESS = ClusterAccess(secret="s3cret of this cluster")


def addresses(port: int | None = None) -> set[str]:
    """On which this process listens, at one port or any."""
    found = psutil.Process().net_connections(kind="tcp")
    listening = [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
    ips = {address.ip for address in listening if port in (None, address.port)}
    return {ip.removeprefix("::ffff:") for ip in ips}  # gRPC's IPv4 addresses are IPv6 ones


@pytest.fixture(autouse=True)
def nothing_else_is_open() -> None:
    assert not addresses() & ALL, "left by an earlier test"


class _Stream:
    """Hears what one side of a pair says."""

    is_dialled = False

    def __init__(self) -> None:
        self.said: SimpleQueue[Any] = SimpleQueue()

    def send(self, message: Message) -> None:
        self.said.put(message.body)

    def close(self) -> None:
        pass


def a_pair(events: SimpleQueue[Any], stream: _Stream) -> Pair:
    setting = LinkSetting(
        events=events,
        clock=MonotonicClock(),
        host="127.0.0.1",
        timeout_s=20.0,
        kv=torch.empty(0),
        turns=Turns(),
    )
    return Pair(stream, setting, _GlooGroup)


def test_the_store_and_the_group_of_a_gloo_link_listen_on_their_own_address() -> None:
    events, stream = SimpleQueue[Any](), _Stream()
    receiver, sender = a_pair(events, stream), a_pair(events, _Stream())
    receiver.host()
    offer = stream.said.get(timeout=20)
    assert isinstance(offer, PairOffer)
    assert addresses(offer.port) == {"127.0.0.1"}
    sender.join(offer)
    assert [type(events.get(timeout=20)) for _ in range(2)] == [PairMet, PairMet]
    assert not addresses() & ALL
    receiver.close()
    sender.close()


def test_a_rank_listens_on_its_own_address() -> None:
    wire = GrpcWire(SimpleQueue(), host="127.0.0.1", access=ACCESS)
    port = int(wire.address.rpartition(":")[2])
    assert addresses(port) == {"127.0.0.1"}
    wire.close()


def test_a_node_listens_on_its_own_address() -> None:
    async def run() -> None:
        async with Site(network=GrpcNetwork(ACCESS)) as site:
            await site.start_decode()
            await site.start_prefill("p0")
            assert not addresses() & ALL
            for node in site.nodes.values():
                port = int(node.address.address.rpartition(":")[2])
                assert addresses(port) == {"127.0.0.1"}

    asyncio.run(run())
