"""What a stranger may send over HTTP before anybody knows it: sizes, counts and times."""

import asyncio
import contextlib
import gc
import json
import socket
import ssl
import struct
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdserve.core.config import LEAST_HEADERS, LimitsConfig
from router.http_guard import LINGER_S, MAX_PIPELINED, GuardedProtocol
from tests.router.conftest import ANSWER, World, WorldMaker, until
from tests.security.certificates import public, write_files
from tests.security.connections import is_served, num_served
from tests.security.raw import Heard, say

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = LimitsConfig(
    header_timeout_s=0.4,
    body_timeout_s=0.4,
    keep_alive_s=1.5,
    max_header_bytes=4096,
    max_headers=20,
    max_connections=16,
    max_body_bytes=10_000,
)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = b'{"prompt": "Hello", "max_tokens": 100}'
GOOD = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bounded(make_world: WorldMaker):
    async with make_world(limits=LIMITS) as made:
        yield made


async def hear(world: World, data: bytes, **drip) -> Heard:
    heard = await say(world.router.http_address, data, **drip)
    assert (await world.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER
    return heard


@pytest.mark.parametrize(
    "begun",
    [b"GET /", b"GET / HTTP/1.1\r\nX-A: ", GOOD + b"GET /", GOOD + b"\r\nGET / HTTP/1.1\r\nX-"],
)
async def test_a_head_that_drips_ends_its_connection(bounded: World, begun: bytes) -> None:
    heard = await hear(bounded, begun, drip=b"a")
    assert b" 408 " in heard.raw
    assert b"the head took more than 0.4 s" in heard.raw
    assert (ANSWER.encode() in heard.raw) == (BODY in begun)


@pytest.mark.parametrize("begun", [b"GET /", GOOD + b"GET /", GOOD + b"\r\nGET / HTTP/1.1\r\nX-"])
async def test_a_head_that_stops_ends_its_connection(bounded: World, begun: bytes) -> None:
    """Behind a request, in the same packet, it counted as nothing."""
    heard = await hear(bounded, begun)
    assert b"the head took more than 0.4 s" in heard.raw
    assert (ANSWER.encode() in heard.raw) == (BODY in begun)


@pytest.mark.parametrize("apart", [False, True])
async def test_who_has_begun_its_next_request_gives_its_place_to_nobody(
    make_world: WorldMaker, apart: bool
) -> None:
    async with make_world(limits=LimitsConfig(max_connections=LEAST_HEADERS)) as world:
        world.decode[0].token_time_s = 0.01
        host, _, port = world.router.http_address.rpartition(":")
        writers = []
        for i in range(LEAST_HEADERS + 1):
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            if i:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                continue
            first = reader
            writer.write(GOOD + (b"" if apart else b"GET /hea"))
            if apart:
                await until(lambda: bool(world.decode[0].submitted))
                writer.write(b"GET /hea")
            assert ANSWER.encode() in await reader.readuntil(b"}]")
        writers[0].write(b"lth HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await first.readuntil(b"\r\n\r\n")
        for writer in writers:
            writer.close()


async def test_a_connection_lives_on_between_requests_longer_than_a_head_may_take(
    bounded: World,
) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    host, _, port = bounded.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for pause_s in (0.0, 2 * LIMITS.header_timeout_s):
        await asyncio.sleep(pause_s)
        writer.write(request)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await reader.read(65536)  # the body
    async with asyncio.timeout(10 * LIMITS.keep_alive_s):
        assert await reader.read() == b""  # and is closed by us then
    writer.close()


async def test_connections_outlive_those_of_proxies_and_clients() -> None:
    assert LimitsConfig().keep_alive_s > 60  # of AWS' load balancers and nginx; httpx: 5


async def test_a_connection_that_says_nothing_is_closed(bounded: World) -> None:
    assert (await hear(bounded, b"")).raw == b""


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 9000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2000\r\n"]
)
async def test_a_body_that_drips_ends_its_connection(bounded: World, framing: bytes) -> None:
    heard = await hear(bounded, POST + framing, drip=b'"')
    assert (heard.status, heard.message) == (408, "the body took more than 0.4 s")


async def test_a_body_that_nobody_reads_holds_no_connection(bounded: World) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n"
    heard = await hear(bounded, request, drip=b"x")
    assert heard.status == 200
    assert heard.after_s < 5


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nX-A: " + 5000 * b"a" + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-A: " + 5_000_000 * b"a",
        b"GET /" + 5000 * b"a" + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + 21 * b"X-A: b\r\n" + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + 500_000 * b"X-A: b\r\n",
    ],
    ids=["long header", "header without end", "long path", "many headers", "endless headers"],
)
async def test_a_head_without_measure_is_refused(bounded: World, head: bytes) -> None:
    heard = await hear(bounded, head)
    if heard.raw:  # who sends on and on may have its connection reset before it reads
        assert heard.status == 431
        assert "larger than 4096 bytes, or has more than 20 headers" in heard.message
    else:
        assert len(head) > 1_000_000


async def test_a_large_body_is_refused_by_its_announcement_and_by_its_size(bounded: World) -> None:
    announced = await hear(bounded, POST + b"Content-Length: 10001\r\n\r\n")
    assert announced.status == 413

    async def chunks():
        for _ in range(11):
            yield b"x" * 1000

    sent = await bounded.http.post("/v1/completions", content=chunks())
    assert sent.status_code == 413
    bound = "larger than 10000 bytes, the most that router.limits.max_body_bytes allows"
    assert sent.json()["error"]["message"].endswith(bound)


async def test_what_is_no_http_is_told_so_and_nothing_of_it_is_repeated_or_logged(
    bounded: World, caplog: pytest.LogCaptureFixture
) -> None:
    heard = await hear(bounded, b"sk-secret \x00\x01 what\r\n\r\n")
    assert (heard.status, heard.message) == (400, "this is no HTTP request")
    assert b"secret" not in heard.raw
    assert not [line for line in caplog.messages if "Invalid" in line or "secret" in line]


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"x" * 1000])
async def test_a_wish_for_another_protocol_is_passed_over(
    bounded: World, protocol: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    wish = b"Connection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\n\r\n"
    heard = await hear(bounded, b"GET /health HTTP/1.1\r\nHost: x\r\n" + wish)
    assert heard.status == 200
    assert not [line for line in caplog.messages if "pgrade" in line]


async def test_more_connections_than_allowed_are_closed_and_the_others_live(
    bounded: World,
) -> None:
    host, _, port = bounded.router.http_address.rpartition(":")
    begun = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
    closed = await asyncio.gather(*(_is_closed_at_once(reader) for reader, _ in begun))
    assert sum(closed) >= 40 - LIMITS.max_connections
    for _, writer in begun:
        writer.close()
    await asyncio.sleep(LIMITS.header_timeout_s)
    async with httpx.AsyncClient(
        base_url=f"http://{bounded.router.http_address}", trust_env=False
    ) as http:
        assert (await http.get("/health")).status_code == 200


async def test_connections_that_wait_between_two_requests_keep_nobody_out(bounded: World) -> None:
    host, _, port = bounded.router.http_address.rpartition(":")
    idle = []
    for _ in range(LIMITS.max_connections):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        idle.append(writer)
    for _ in range(2):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(GOOD)
        assert ANSWER.encode() in await reader.readuntil(b"}]"), "a new client was hung up on"
        idle.append(writer)
    for writer in idle:
        writer.close()


async def test_a_body_that_comes_after_its_answer_leaves_a_connection_like_any_other(
    bounded: World,
) -> None:
    """It had no deadline then, and its place was nobody else's."""
    host, _, port = bounded.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n01234")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"56789")
    async with asyncio.timeout(10 * LIMITS.keep_alive_s):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("sealed", [False, True])
async def test_who_still_takes_an_answer_gives_its_place_to_nobody(
    make_world: WorldMaker, tmp_path: Path, sealed: bool
) -> None:
    """It would be cut off, or its connection would live on as one too many."""
    folder = write_files(tmp_path / "certs")
    trusting = ssl.create_default_context(cafile=folder / "public-ca.pem")
    async with make_world(
        limits=LimitsConfig(max_connections=LEAST_HEADERS),
        security=public(folder) if sealed else None,
        verify=trusting,
    ) as world:
        asked = {"prompt": "<|start|>", "add_special_tokens": False}
        (token_id,) = (await world.http.post("/tokenize", json=asked)).json()["tokens"]
        body = json.dumps({"tokens": [token_id] * 1_000_000}).encode()  # 9 MB of text
        head = POST.replace(b"/v1/completions", b"/detokenize")
        host, _, port = world.router.http_address.rpartition(":")
        connect = partial(asyncio.open_connection, host, int(port), limit=1024)
        connect = partial(connect, ssl=trusting if sealed else None)
        slow, slow_writer = await connect()
        slow_writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        length = int((await slow.readuntil(b"\r\n\r\n")).partition(b"length: ")[2].split()[0])
        writers = [slow_writer]
        for _ in range(2 * LEAST_HEADERS):
            reader, writer = await connect()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
        await until(lambda: num_served(int(port)) <= LEAST_HEADERS)
        await asyncio.sleep(1.5 * LINGER_S)  # then it would be cut off
        await slow.readexactly(length)
        for writer in writers:
            writer.close()


async def test_of_a_client_that_hangs_up_hard_nothing_is_kept(bounded: World) -> None:
    host, _, server_port = bounded.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(server_port))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    own = writer.get_extra_info("socket")
    port = own.getsockname()[1]
    own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # by a reset
    writer.close()
    await until(lambda: not is_served(port))
    gc.collect()
    kept = [item for item in gc.get_objects() if type(item) is GuardedProtocol]
    assert port not in [item.client[1] for item in kept if item.client]


async def _is_closed_at_once(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(LIMITS.header_timeout_s / 2):
            return await reader.read(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_requests_that_follow_each_other_at_once_are_all_answered(bounded: World) -> None:
    bounded.decode[0].token_time_s = 0.02  # the first answer takes longer than a head may
    close = GOOD.replace(b"Host: x", b"Host: x\r\nConnection: close")
    heard = await say(bounded.router.http_address, GOOD + b"\r\n" + GOOD + close)
    bounded.decode[0].token_time_s = 0.0
    assert heard.raw.count(ANSWER.encode()) == 3


async def test_what_is_garbled_behind_requests_is_refused_after_their_answers(
    bounded: World,
) -> None:
    bounded.decode[0].token_time_s = 0.02  # the answer takes longer than a head may
    address = bounded.router.http_address
    for garbage in (b"\x00\x01 what\r\n\r\n", b"GET /" + 9000 * b"a"):
        heard = await say(address, GOOD + GOOD + garbage)
        assert heard.raw.count(ANSWER.encode()) == 2
        last = heard.raw.rpartition(b"HTTP/1.1 ")[2]
        assert last[:3] == (b"400" if b"what" in garbage else b"431")
    garbled = POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n"
    assert (await say(address, garbled)).status == 400
    for garbage in (
        garbled,
        b"CONNECT x:80 HTTP/1.1\r\n\r\n",
        b"GET http://x:99999/ HTTP/1.1\r\n\r\n",
    ):
        heard = await say(address, GOOD + GOOD + garbage)
        assert heard.raw.count(ANSWER.encode()) == 2
        assert heard.raw.rpartition(b"HTTP/1.1 ")[2].startswith(b"400")
    bounded.decode[0].token_time_s = 0.0


@pytest.mark.parametrize(
    "first_line",
    [
        b"CONNECT x:80 HTTP/1.1",
        b"CONNECT / HTTP/1.1",
        b"CONNECT * HTTP/1.1",
        b"CONNECT http://x/ HTTP/1.1",
        b"GET http://x:99999/ HTTP/1.1",
        b"PRI * HTTP/2.0",
    ],
)
async def test_a_target_that_is_none_is_refused_without_a_fault(
    bounded: World, first_line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """CONNECT alone made the router parse the same head for ever."""
    heard = await hear(bounded, first_line + b"\r\nHost: x\r\n\r\nSM\r\n\r\n")
    assert heard.status == 400
    assert not [record for record in caplog.records if record.exc_info]


async def test_who_asks_for_another_protocol_too_is_answered_in_this_one(bounded: World) -> None:
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    post = POST + wish + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n" + wish + b"\r\n"
    heard = await say(bounded.router.http_address, post + get + post + GOOD)
    assert heard.raw.count(b"HTTP/1.1 200") == 4
    assert heard.raw.count(ANSWER.encode()) == 3


async def test_requests_that_are_sent_ahead_without_end_are_not_taken_in(bounded: World) -> None:
    heard = await hear(bounded, 5000 * b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert heard.raw.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
    last = heard.raw.rpartition(b"HTTP/1.1 ")[2]
    assert last.startswith(b"400")
    assert b"more than 64 requests were sent ahead" in last


async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_ahead(bounded: World) -> None:
    node = bounded.decode[0]
    node.token_time_s = 0.02
    num_submitted, num_aborted = len(node.submitted), len(node.aborted)
    host, _, port = bounded.router.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(GOOD + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + GOOD)
    await until(lambda: len(node.submitted) > num_submitted)
    writer.close()
    await until(lambda: len(node.aborted) > num_aborted)
    assert node.aborted[-1] == node.submitted[-1].key
    node.token_time_s = 0.0


@pytest.mark.parametrize("says_more", [False, True])
@pytest.mark.parametrize("num_asked", [3, MAX_PIPELINED])
async def test_a_client_that_takes_no_answers_is_cut_off(
    make_world: WorldMaker, num_asked: int, says_more: bool
) -> None:
    async with make_world(limits=LimitsConfig(client_stall_s=0.4, header_timeout_s=1.0)) as world:
        host, _, server_port = world.router.http_address.rpartition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(server_port)))
            client.sendall(num_asked * b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(20):
                port = client.getsockname()[1]
                await until(lambda: is_served(port))
                while is_served(port):
                    if says_more:
                        with contextlib.suppress(OSError):
                            client.send(b"x")
                    await asyncio.sleep(0.05)
