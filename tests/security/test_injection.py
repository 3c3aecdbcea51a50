"""What clients say cannot be made headers, log lines or paths; and what they ask is not logged."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from tests.router.conftest import World
from tests.security.raw import say

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = b'{"prompt": "Hello", "max_tokens": 2}'
FORGED = "ERROR router all is lost"
TRAVERSALS = [
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "....//....//etc/passwd",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "tiny/../../etc/passwd",
    "tiny%00.json",
    "file:///etc/passwd",
]


def post(*headers: bytes) -> bytes:
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"Host: x",
        b"Connection: close",
        b"Content-Length: %d" % len(BODY),
        *headers,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + BODY


@pytest.mark.parametrize(
    "label",
    [
        b"a\x00b\x1b[31mred",
        b"\x7f\x80\xff",
        "ünï\u2028code\u0085".encode(),
        b"a\tb",
        b"x" * 20_000,
        b"%0d%0aSet-Cookie: a=b",
        b"${jndi:ldap://x}\\n" + FORGED.encode(),
    ],
)
async def test_a_label_comes_back_as_one_short_header_and_one_line(
    world: World, label: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        heard = await say(world.router.http_address, post(b"X-Request-Id: " + label))
    head = heard.raw.partition(b"\r\n\r\n")[0]
    if heard.status == 400:  # characters that no header may have
        return
    (shown,) = (line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id:"))
    value = shown.partition(b": ")[2]
    assert len(value) <= 128
    assert value.isascii()
    assert value.decode().isprintable()
    assert b"set-cookie:" not in head.lower().replace(shown.lower(), b"")
    for record in caplog.records:
        assert record.getMessage().isprintable() or record.name.startswith("asyncio")


@pytest.mark.parametrize("ending", [b"\n", b"\r", b"\r\n "])
async def test_a_line_break_in_a_header_makes_no_other_header_or_line(
    world: World, ending: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    heard = await say(
        world.router.http_address, post(b"X-Request-Id: a" + ending + b"X-Evil: " + FORGED.encode())
    )
    assert b"\r\nX-Evil" not in heard.raw
    assert not any(line.startswith(FORGED) for line in caplog.text.splitlines())


async def test_a_label_over_grpc_is_as_clean(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    label = f"a\r\n{FORGED}\x1b[2J" + "x" * 10_000
    with caplog.at_level(logging.DEBUG):
        async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            async for _ in stub.Generate(pb.GenerateRequest(text="Hello", label=label)):
                pass
    lines = caplog.text.splitlines()
    assert not any(line.startswith(FORGED) for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert max(map(len, lines)) < 1000


@pytest.mark.parametrize("model", TRAVERSALS)
async def test_a_model_name_is_a_name_and_no_path(world: World, model: str) -> None:
    asked = await world.http.get(f"/v1/models/{model}")
    assert asked.status_code in (404, 400)
    assert "root:" not in asked.text
    named = await world.complete(model=model)
    assert named.status_code == 404
    assert named.json()["error"]["code"] == "model_not_found"
    heard = await say(
        world.router.http_address,
        f"GET /v1/models/{model} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(),
    )
    assert heard.status in (400, 404)
    assert b"root:" not in heard.raw


async def test_a_huge_model_name_is_shown_in_part(world: World) -> None:
    answer = await world.complete(model="m" * 1_000_000)
    assert answer.status_code == 404
    assert len(answer.text) < 1000


async def test_prompts_users_and_answers_are_not_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    marker = "Xyzzy-marker"
    with caplog.at_level(logging.DEBUG):
        for fields in (
            {"prompt": f"my secret is {marker}", "user": f"{marker}\n{FORGED}"},
            {"prompt": f"{marker} " * 5000},
            {"prompt": marker, "temperature": marker},
            {"prompt": marker, "stop": [f"{marker}"], "max_tokens": -1},
            {"prompt": [marker]},
            {"prompt": marker, marker: 1},
        ):
            await world.http.post("/v1/completions", json={"max_tokens": 2, **fields})
            messages = [{"role": "user", "content": marker}]
            chat = {k: v for k, v in fields.items() if k != "prompt"} | {"messages": messages}
            await world.http.post("/v1/chat/completions", json={"max_tokens": 2, **chat})
        await world.http.post("/tokenize", json={"prompt": marker})
        async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            async for _ in stub.Generate(pb.GenerateRequest(text=marker)):
                pass
    await asyncio.sleep(0)
    assert any("request" in record.getMessage() for record in caplog.records), "it does log"
    assert marker not in caplog.text
    assert FORGED not in caplog.text
