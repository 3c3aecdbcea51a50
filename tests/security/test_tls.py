"""TLS of the public ports and between the processes of a cluster, tried from outside."""

import asyncio
import contextlib
import socket
import ssl
import warnings
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from kv_transfer.messages import Heartbeat, Message
from kv_transfer.transports.grpc_wire import GrpcWire
from kv_transfer.transports.transport import Arrived, Closed, Opened
from pdserve import cli
from pdserve.bench.serve import first_model
from pdserve.bench.server import named_server
from pdserve.client.async_client import AsyncClient
from pdserve.client.client import Client
from pdserve.cluster.own_certificate import pinned_context
from pdserve.cluster.readiness import wait_until_ready
from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.config import LEAST_HEADERS, LimitsConfig
from pdserve.core.errors import ConfigError, NoNodeError
from pdserve.core.security_config import SecurityConfig
from pdserve.rpc.network import GrpcNetwork
from pdserve.rpc.v1 import session_pb2_grpc
from tests.nodes.site import HELLO, PATIENCE_S, Site
from tests.router.conftest import ANSWER, World, WorldMaker, until
from tests.security.certificates import SECRET, member, public, write_files
from tests.security.connections import is_served, num_served
from tests.security.raw import say
from tests.security.routers import a_router

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("certs") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("certs") / "others")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sealed(make_world: WorldMaker, folder: Path):
    trusting = ssl.create_default_context(cafile=folder / "public-ca.pem")
    limits = LimitsConfig(header_timeout_s=0.4, body_timeout_s=0.4)
    async with make_world(security=public(folder), verify=trusting, limits=limits) as made:
        yield made


# ---- public ports -------------------------------------------------------------------------------


async def test_http_and_grpc_are_served_over_tls(sealed: World, folder: Path) -> None:
    assert (await sealed.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER
    ca_file = folder / "public-ca.pem"
    async with AsyncClient(sealed.router.grpc_address, ca_file=ca_file) as client:
        assert (await client.generate("Hello", max_tokens=100)).choices[0].text == ANSWER

    def ask() -> str:
        with Client(sealed.router.grpc_address, ca_file=ca_file) as client:
            return client.generate("Hello", max_tokens=100).choices[0].text

    assert await asyncio.to_thread(ask) == ANSWER


@pytest.mark.parametrize("begun", [b"", b"GET /", b"GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"])
async def test_who_does_not_say_goodbye_is_let_go_of_when_it_is_late(
    sealed: World, folder: Path, begun: bytes
) -> None:
    trusting = ssl.create_default_context(cafile=folder / "public-ca.pem")
    host, _, port = sealed.router.http_address.rpartition(":")

    def connect() -> ssl.SSLSocket:
        plain = socket.create_connection((host, int(port)), PATIENCE_S)
        return trusting.wrap_socket(plain, server_hostname=host)

    with await asyncio.to_thread(connect) as client:
        client.sendall(begun)
        own_port = client.getsockname()[1]
        await until(lambda: not is_served(own_port))


async def test_who_does_not_say_goodbye_holds_no_place_that_another_was_given(
    make_world: WorldMaker, folder: Path
) -> None:
    """A client that keeps a connection for later does not look at it meanwhile."""
    trusting = ssl.create_default_context(cafile=folder / "public-ca.pem")
    limits = LimitsConfig(max_connections=LEAST_HEADERS)
    async with make_world(security=public(folder), verify=trusting, limits=limits) as world:
        host, _, port = world.router.http_address.rpartition(":")

        def ask() -> tuple[ssl.SSLSocket, bytes]:
            plain = socket.create_connection((host, int(port)), PATIENCE_S)
            sealed = trusting.wrap_socket(plain, server_hostname=host)
            sealed.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return sealed, sealed.recv(1 << 16)

        with contextlib.ExitStack() as kept:
            for _ in range(2 * LEAST_HEADERS):
                client, answer = await asyncio.to_thread(ask)
                kept.enter_context(client)
                assert b" 200 " in answer
            await until(lambda: num_served(int(port)) <= LEAST_HEADERS)


async def test_commands_and_clients_say_what_tls_lacks(
    sealed: World, capsys: pytest.CaptureFixture[str]
) -> None:
    at = sealed.router.http_address
    for scheme, hint in (("https", "--ca"), ("http", "https://")):
        status = await asyncio.to_thread(cli.main, ["status", "--url", f"{scheme}://{at}"])
        assert status == cli.EXIT_FAILED
        assert hint in capsys.readouterr().err.rpartition("; ")[2]

    def ask(tls: bool) -> None:
        with Client(sealed.router.grpc_address, tls=tls) as client:
            client.model_info()

    for tls in (False, True):
        with pytest.raises(NoNodeError, match=r"TLS.*ca_file"):
            await asyncio.to_thread(ask, tls)


async def test_a_bench_trusts_its_ca_or_that_of_the_environment(
    sealed: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, ca = f"https://{sealed.router.http_address}", str(folder / "public-ca.pem")

    def models(given: str | None) -> str:
        server = named_server(url, given)
        return first_model(server.url, server.verify)

    with pytest.raises(ConfigError, match="--ca"):
        await asyncio.to_thread(models, None)
    assert await asyncio.to_thread(models, ca) == "tiny"
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    assert await asyncio.to_thread(models, None) == "tiny"


async def test_commands_on_the_routers_host_know_its_certificate(
    sealed: World, folder: Path, others: Path
) -> None:
    ours, theirs = (str(each / "router.pem") for each in (folder, others))
    await wait_until_ready(sealed.router.grpc_address, PATIENCE_S, ours)
    url = f"https://{sealed.router.http_address}/health"
    async with httpx.AsyncClient(verify=pinned_context(ours), trust_env=False) as http:
        assert (await http.get(url)).status_code == 200
    async with httpx.AsyncClient(verify=pinned_context(theirs), trust_env=False) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)
    with pytest.raises(NoNodeError):
        await wait_until_ready(sealed.router.grpc_address, PATIENCE_S, theirs)
    for certificate in (str(folder / "nowhere.pem"), __file__):
        with pytest.raises(ConfigError, match=Path(certificate).name):
            pinned_context(certificate)
        with pytest.raises(ConfigError, match=Path(certificate).name):
            await wait_until_ready(sealed.router.grpc_address, 1.0, certificate)


@pytest.mark.parametrize("data", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x00"])
async def test_plain_text_to_a_tls_port_gets_no_answer_and_harms_nobody(
    sealed: World, data: bytes
) -> None:
    if data.startswith(b"GET"):
        heard = await say(sealed.router.http_address, data)
        assert not heard.raw.startswith(b"HTTP")
        assert b"health" not in heard.raw
    assert (await sealed.http.get("/health")).status_code == 200


async def test_plain_grpc_to_a_tls_port_gets_no_answer(sealed: World) -> None:
    async with AsyncClient(sealed.router.grpc_address) as client:
        with pytest.raises(NoNodeError):
            await client.generate("Hello")


async def test_a_client_that_trusts_another_ca_says_nothing(sealed: World, others: Path) -> None:
    ca_file = others / "public-ca.pem"
    async with AsyncClient(sealed.router.grpc_address, ca_file=ca_file) as client:
        with pytest.raises(NoNodeError):
            await client.generate("Hello")
    trusting = ssl.create_default_context(cafile=ca_file)
    async with httpx.AsyncClient(verify=trusting, trust_env=False) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"https://{sealed.router.http_address}/health")


async def test_old_versions_of_tls_are_not_spoken(sealed: World) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for address in (sealed.router.http_address, sealed.router.grpc_address):
        host, _, port = address.rpartition(":")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=old)


async def test_a_head_that_drips_inside_tls_ends_its_connection(
    sealed: World, folder: Path
) -> None:
    trusting = ssl.create_default_context(cafile=folder / "public-ca.pem")
    host, _, port = sealed.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    writer.write(b"GET / HTTP/1.1\r\nX-")
    async with asyncio.timeout(PATIENCE_S):
        assert b" 408 " in await reader.read(-1)
    writer.close()
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("broken", ["tls_certificate", "tls_key"])
async def test_files_that_cannot_be_used_are_named(
    tiny_dir: Path, folder: Path, tmp_path: Path, broken: str
) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate")
    for path in (empty, tmp_path / "nowhere.pem"):
        security = replace(public(folder), **{broken: str(path)})
        with pytest.raises(ConfigError, match=rf"security\.{broken}.*{path.name}"):
            async with a_router((), tiny_dir, security=security):
                pass


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_key": "k"}, "tls_certificate"),
        ({"tls_certificate": "c"}, "tls_key"),
        ({"cluster_ca": "a", "cluster_key": "k"}, "cluster_certificate"),
    ],
)
async def test_half_of_what_tls_needs_is_refused(given: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"^security\.{missing}: got none"):
        SecurityConfig(**given)


# ---- between the processes of a cluster ---------------------------------------------------------


async def test_a_cluster_with_certificates_serves(folder: Path, tiny_dir: Path) -> None:
    access = member(folder)
    async with Site(network=GrpcNetwork(access)) as site:
        await site.start_decode()
        site.decode.set_prefill_nodes((await site.start_prefill("p0"),))
        addresses = tuple(node.address for node in site.nodes.values())
        async with a_router(addresses, tiny_dir, access) as client:
            async with asyncio.timeout(PATIENCE_S):
                while (await client.get("/ready")).json()["status"] != "ready":
                    await asyncio.sleep(0.05)
            body = {"prompt": [5] * 50, "max_tokens": 3, "ignore_eos": True, "timeline": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["timeline"]["route"] == "disaggregated"


def strangers(folder: Path, others: Path) -> dict[str, ClusterAccess]:
    """All have the secret; none has what TLS asks for."""
    return {
        "no TLS": ClusterAccess(secret=SECRET),
        "certificate of another CA": member(others, ca=folder),
        "the router's public certificate": member(folder, name="router"),
    }


@pytest.mark.parametrize("who", strangers(Path(), Path()))
async def test_who_has_no_certificate_of_the_cluster_reaches_no_node(
    folder: Path, others: Path, who: str
) -> None:
    async with Site(network=GrpcNetwork(member(folder))) as site:
        await site.start_decode()
        network = GrpcNetwork(strangers(folder, others)[who])
        async with network.channel(site.decode.address.address) as channel:
            call: Any = session_pb2_grpc.DecodeNodeStub(channel).Session(iter(()))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.secure_channel(
            site.decode.address.address,
            grpc.ssl_channel_credentials((folder / "cluster-ca.pem").read_bytes()),
            options=(("grpc.ssl_target_name_override", "pdserve-cluster"),),
        ) as channel:
            watch: Any = session_pb2_grpc.PrefillNodeStub(channel).Watch(HELLO)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await watch.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_node_whose_certificate_is_not_the_clusters_hears_nothing(
    folder: Path, others: Path, tiny_dir: Path
) -> None:
    async with Site(network=GrpcNetwork(member(others))) as site:
        await site.start_decode()
        async with a_router((site.decode.address,), tiny_dir, member(folder)) as client:
            async with asyncio.timeout(PATIENCE_S):
                while "UNAVAILABLE" not in (await client.get("/admin/status")).text:
                    await asyncio.sleep(0.05)


async def test_ranks_with_certificates_are_linked_and_others_are_not(
    folder: Path, others: Path
) -> None:
    events = SimpleQueue[Any]()
    rank = GrpcWire(events, host="127.0.0.1", access=member(folder))
    wires = [rank]
    for access in strangers(folder, others).values():
        lost = SimpleQueue[Any]()
        wires.append(GrpcWire(lost, host="127.0.0.1", access=access))
        wires[-1].connect(rank.address).send(Message(Heartbeat()))
        closed = lost.get(timeout=20)
        assert isinstance(closed, Closed)
        assert "UNAVAILABLE" in str(closed.error)
    assert events.empty()
    wires.append(GrpcWire(SimpleQueue(), host="127.0.0.1", access=member(folder)))
    wires[-1].connect(rank.address).send(Message(Heartbeat()))
    assert isinstance(events.get(timeout=10), Opened)
    assert isinstance(events.get(timeout=10), Arrived)
    for wire in wires:
        wire.close()
