"""Sessions without the cluster's secret: refused by name, by every service of nodes and ranks."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import pytest

from kv_transfer.messages import Heartbeat, Message
from kv_transfer.transports.codec import encode
from kv_transfer.transports.grpc_wire import METHOD as LINK
from kv_transfer.transports.grpc_wire import GrpcWire
from kv_transfer.transports.transport import Arrived, Closed, Opened
from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.node import NodeAddress
from pdserve.rpc.gate import METADATA_KEY, Challenge, answer, new_nonce, node_proof
from pdserve.rpc.network import GrpcNetwork
from pdserve.rpc.v1 import gate_pb2, gate_pb2_grpc, session_pb2, session_pb2_grpc
from tests.nodes.site import HELLO, PATIENCE_S, Site
from tests.security.routers import a_router

ACCESS = ClusterAccess(secret="s3cret of this cluster")
OTHER = ClusterAccess(secret="s3cret of another")
METHODS = {
    "/pdserve.v1.DecodeNode/Session": session_pb2.RouterMessage(hello=HELLO),
    "/pdserve.v1.PrefillNode/Session": session_pb2.PrefillRequest(),
    "/pdserve.v1.PrefillNode/Watch": HELLO,
}


@asynccontextmanager
async def a_pair() -> AsyncIterator[Site]:
    """A decode node and a prefill node that know the secret, connected to each other."""
    async with Site(network=GrpcNetwork(ACCESS)) as site:
        await site.start_decode()
        site.decode.set_prefill_nodes((await site.start_prefill("p0"),))
        yield site


def address_of(site: Site, method: str) -> str:
    return site.nodes["decode-0" if "DecodeNode" in method else "p0"].address.address


async def first_of(
    address: str, method: str, proof: bytes | None, *, says_hello: bool = True
) -> bytes:
    """What a node says first. Raises AioRpcError where it refuses."""

    async def hello() -> AsyncIterator[bytes]:
        if says_hello:
            yield METHODS[method].SerializeToString()
        await asyncio.sleep(PATIENCE_S)

    metadata = () if proof is None else ((METADATA_KEY, proof),)
    async with grpc.aio.insecure_channel(address) as channel:
        begin: Any = channel.stream_stream(method)
        call = begin(hello(), metadata=metadata, timeout=PATIENCE_S)
        first: bytes = await call.read()
        return first


async def refusal(address: str, method: str, proof: bytes | None) -> str:
    """In what words, of who says nothing: a message that meets the refusal hides it (grpc.aio)."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await first_of(address, method, proof, says_hello=False)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    details = raised.value.details() or ""
    assert ACCESS.secret not in details
    return details


async def proof_for(address: str, method: str, secret: str) -> bytes:
    """An answer to a challenge of the node, of who has that secret."""
    nonce = new_nonce()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = gate_pb2_grpc.GateStub(channel)
        reply = await stub.Challenge(gate_pb2.ChallengeRequest(nonce=nonce))
    taken = Challenge(nonce=reply.nonce, proof=node_proof(secret, nonce, reply.nonce))
    return answer(secret, method, nonce, taken)


async def test_strangers_are_refused_on_every_service_of_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_pair() as site:
        for method in METHODS:
            address = address_of(site, method)
            assert "no proof of the cluster's secret" in await refusal(address, method, None)
            wrong = await proof_for(address, method, OTHER.secret)
            assert "of another secret" in await refusal(address, method, wrong)
            assert "wrong length" in await refusal(address, method, b"x")
            assert "no challenge of this node" in await refusal(address, method, bytes(88))
    lines = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert lines
    assert len(lines) <= len(site.nodes), "a stranger cannot fill the log"
    assert ACCESS.secret not in caplog.text


async def test_a_recorded_session_cannot_be_replayed() -> None:
    async with a_pair() as site:
        for method in ("/pdserve.v1.DecodeNode/Session", "/pdserve.v1.PrefillNode/Watch"):
            address = address_of(site, method)
            recorded = await proof_for(address, method, ACCESS.secret)
            assert await first_of(address, method, recorded)
            assert "used before" in await refusal(address, method, recorded)
        elsewhere = await proof_for(address, method, ACCESS.secret)
        other = "/pdserve.v1.PrefillNode/Session"
        assert "another secret" in await refusal(address, other, elsewhere)
        decode = "/pdserve.v1.DecodeNode/Session"
        assert "no challenge" in await refusal(address_of(site, decode), decode, elsewhere)


async def until_status(client: httpx.AsyncClient, words: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while words not in (await client.get("/admin/status")).text:
            await asyncio.sleep(0.05)


async def test_a_cluster_that_shares_the_secret_serves(tiny_dir: Path) -> None:
    async with a_pair() as site:
        addresses = tuple(node.address for node in site.nodes.values())
        async with a_router(addresses, tiny_dir, ACCESS) as client:
            async with asyncio.timeout(PATIENCE_S):
                while (await client.get("/ready")).json()["status"] != "ready":
                    await asyncio.sleep(0.05)
            body = {"prompt": [5] * 50, "max_tokens": 3, "ignore_eos": True, "timeline": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["timeline"]["route"] == "disaggregated"
            assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("access", "words"),
    [(None, "no proof of the cluster's secret"), (OTHER, "who answers there has another secret")],
)
async def test_a_router_without_the_secret_is_refused_and_says_why(
    tiny_dir: Path, access: ClusterAccess | None, words: str
) -> None:
    async with a_pair() as site:
        addresses = tuple(node.address for node in site.nodes.values())
        async with a_router(addresses, tiny_dir, access) as client:
            await until_status(client, words)
            assert (await client.get("/ready")).status_code == 503


class _FalseNode(session_pb2_grpc.DecodeNodeServicer):
    """Takes the address of a node and waits for requests."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in request_iterator:
            self.heard.append(message)
        yield session_pb2.DecodeMessage()


@pytest.mark.parametrize(
    ("access", "words"),
    [(None, "UNIMPLEMENTED"), (OTHER, "who answers there has another secret")],
)
async def test_a_node_without_the_secret_hears_nothing(
    tiny_dir: Path, access: ClusterAccess | None, words: str
) -> None:
    network, node = GrpcNetwork(access), _FalseNode()
    server = network.server()
    session_pb2_grpc.add_DecodeNodeServicer_to_server(node, server)
    port = network.bind(server, "127.0.0.1:0")
    await server.start()
    async with a_pair() as site:
        false = NodeAddress(
            name="decode-0",
            role=site.decode.address.role,
            incarnation=site.decode.address.incarnation,
            address=f"127.0.0.1:{port}",
        )
        async with a_router((false,), tiny_dir, ACCESS) as client:
            await until_status(client, words)
    assert node.heard == []
    await server.stop(0)


async def test_a_prefill_node_without_the_secret_is_not_taken_into_the_cluster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Site(network=GrpcNetwork(OTHER)) as others, a_pair() as site:
        with caplog.at_level(logging.WARNING):
            site.decode.set_prefill_nodes((await others.start_prefill("p9"),))
            async with asyncio.timeout(PATIENCE_S):
                while "who answers there has another secret" not in caplog.text:
                    await asyncio.sleep(0.05)


# ---- KV links -----------------------------------------------------------------------------------


def test_ranks_that_share_the_secret_are_linked() -> None:
    ours, theirs = SimpleQueue[Any](), SimpleQueue[Any]()
    wire, other = (GrpcWire(q, host="127.0.0.1", access=ACCESS) for q in (ours, theirs))
    wire.connect(other.address).send(Message(Heartbeat()))
    assert isinstance(theirs.get(timeout=10), Opened)
    assert isinstance(theirs.get(timeout=10), Arrived)
    wire.close()
    other.close()


@pytest.mark.parametrize(
    ("access", "words"),
    [(None, "no proof of the cluster's secret"), (OTHER, "who answers there has another secret")],
)
def test_a_rank_without_the_secret_gets_no_link(access: ClusterAccess | None, words: str) -> None:
    ours, theirs = SimpleQueue[Any](), SimpleQueue[Any]()
    wire = GrpcWire(ours, host="127.0.0.1", access=access)
    other = GrpcWire(theirs, host="127.0.0.1", access=ACCESS)
    wire.connect(other.address).send(Message(Heartbeat()))
    closed = ours.get(timeout=10)
    assert isinstance(closed, Closed)
    assert words in str(closed.error)
    assert theirs.empty(), "nothing of it reached the endpoint"
    wire.close()
    other.close()


async def test_a_recorded_link_cannot_be_replayed() -> None:
    events = SimpleQueue[Any]()
    wire = GrpcWire(events, host="127.0.0.1", access=ACCESS)
    recorded = await proof_for(wire.address, LINK, ACCESS.secret)

    async def messages() -> AsyncIterator[bytes]:
        await asyncio.sleep(PATIENCE_S)  # gRPC's client calls a refusal while it writes INTERNAL
        yield encode(Message(Heartbeat()))

    async def dial() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(wire.address) as channel:
            given = ((METADATA_KEY, recorded),)
            begin: Any = channel.stream_stream(LINK)
            call = begin(messages(), metadata=given, timeout=1)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            code: grpc.StatusCode = raised.value.code()
            return code

    assert await dial() is grpc.StatusCode.DEADLINE_EXCEEDED, "taken in, and left waiting"
    assert isinstance(events.get(timeout=10), Opened)
    assert await dial() is grpc.StatusCode.UNAUTHENTICATED
    wire.close()
