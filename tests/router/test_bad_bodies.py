"""Bodies that are wrong as a whole: their size, their form, their counts, how they were sent."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError, model_validator

from pdserve.core.config import LimitsConfig
from router.duplicate_keys import MAX_READ_TWICE
from router.http_bodies import bound_parsing, read_body
from router.openai_schema import DetokenizeBody
from tests.router.conftest import World, WorldMaker, error_of
from tests.security.raw import say

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 3600.0  # nobody is taken for silent while megabytes are made and read
GOOD = {"prompt": "Hello", "max_tokens": 2}
LARGE = 1_000_000
DEEP = "[" * 100_000 + "]" * 100_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_world(make_world: WorldMaker) -> AsyncIterator[World]:
    async with make_world(silence_s=PATIENCE_S) as made:
        yield made


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{not json",
        b"[1,2]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe", "messages": "\xff"}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": NaN, "messages": NaN}',
        b'{"prompt": 1' + b"0" * 5000 + b', "messages": 1' + b"0" * 5000 + b"}",
        ('{"prompt": ' + DEEP + ', "messages": ' + DEEP + "}").encode(),
        b'{"prompt": "Hi", "messages": [], "temperature": 1e999, "model": 1e999}',
        b"\x00\x01\x02",
    ],
)
async def test_a_body_that_is_no_request_is_a_client_error(
    world: World, route: str, body: bytes
) -> None:
    response = await world.http.post(route, content=body)
    assert response.status_code == 400
    assert error_of(response)["message"]


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
@pytest.mark.parametrize(
    ("body", "got"),
    [("null", "null"), ("[]", "a list"), ('"x"', "'x'"), ("5", "5"), ("true", "true")],
)
async def test_a_body_that_is_no_object_is_told_what_it_is(
    shared_world: World, route: str, body: str, got: str
) -> None:
    response = await shared_world.http.post(f"/v1/{route}", content=body)
    assert error_of(response)["message"] == f"body: got {got}, allowed is a JSON object"


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("completions", {"prompt": "a", "stop": 5},
         "stop: got 5, allowed is a text or a list of texts"),
        ("completions", {"prompt": "a", "stop": {}},
         "stop: got an object, allowed is a text or a list of texts"),
        ("completions", {"prompt": "a", "logit_bias": 5},
         "logit_bias: got 5, allowed is a JSON object"),
        ("completions", {"prompt": "a", "stop": [None]},
         "stop[0]: got null: Input should be a valid string"),
        ("completions", {"prompt": None},
         "prompt: got null, expected a text, a list of token ids, or a list of either"),
        ("chat/completions", {"messages": [None]},
         "messages[0]: got null, allowed is a JSON object"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]},
         "messages[0].content: got 5, allowed is a text or a list of parts"),
        ("responses", {"input": 5}, "input: got 5, allowed is a text or a list of items"),
        ("responses", {"input": None}, "input: got null, allowed is a text or a list of items"),
        ("responses", {"input": [{"role": "user", "content": 5}]},
         "input[0].content: got 5, allowed is a text or a list of parts"),
        ("responses", {"input": [{"type": "function_call_output", "output": True}]},
         "input[0].output: got true, allowed is a text or a list of parts"),
    ],
)  # fmt: skip
async def test_what_has_the_wrong_type_is_told_all_that_is_allowed(
    shared_world: World, route: str, body: dict[str, object], message: str
) -> None:
    response = await shared_world.http.post(f"/v1/{route}", json=body)
    assert response.status_code == 400
    assert error_of(response)["message"] == message


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_without_being_read(
    make_world: WorldMaker, announced: bool
) -> None:
    async def pieces() -> object:
        for _ in range(100):
            yield b"x" * 1000

    async with make_world(limits=LimitsConfig(max_body_bytes=5000)) as world:
        content = b"x" * 100_000 if announced else pieces()
        response = await world.http.post("/v1/completions", content=content)  # type: ignore[arg-type]
        assert response.status_code == 413
        allowed = "larger than 5000 bytes, the most that router.limits.max_body_bytes allows"
        assert str(error_of(response)["message"]).endswith(allowed)
        assert (await world.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("completions", {"prompt": "a", "stop": [1] * LARGE}, "stop"),
        ("completions", {"prompt": "a", "stop_token_ids": ["x"] * LARGE}, "stop_token_ids"),
        ("completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(500)), 1)},
         "logit_bias"),
        ("completions", {"prompt": [1] * 8 * LARGE}, "prompt"),
        ("completions", {"prompt": [1] * LARGE}, "prompt"),
        ("completions", {"prompt": "a", "metadata": [{}] * 2 * LARGE}, "metadata"),
        ("completions", {"prompt": "a", "guided_choice": [1] * 5000}, "guided_choice"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 333_000},
         "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}] * 500_000}]},
         "messages[0].content"),
        ("responses", {"input": "a", "include": [1] * LARGE}, "include"),
    ],
)  # fmt: skip
async def test_a_list_that_is_far_too_long_is_refused_by_its_count(
    shared_world: World, route: str, body: dict[str, object], field: str
) -> None:
    content = json.dumps(body, separators=(",", ":")).encode()
    response = await shared_world.http.post(f"/v1/{route}", content=content)
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert len(str(error_of(response)["message"])) < 300


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\\" * 1_000_000])
async def test_a_key_of_a_megabyte_is_not_repeated(shared_world: World, name: str) -> None:
    response = await shared_world.complete(logit_bias={name: "x"})
    assert response.status_code == 400
    assert len(str(error_of(response)["message"])) < 400


async def test_a_list_is_validated_up_to_its_first_wrong_entry() -> None:
    with pytest.raises(ValidationError) as raised:
        DetokenizeBody.model_validate({"tokens": ["x"] * 1000})
    assert raised.value.error_count() == 1


@pytest.mark.parametrize(("size", "is_inline"), [(10, True), (100_000, False)])
async def test_a_large_body_is_parsed_off_the_loop(size: int, is_inline: bool) -> None:
    threads = []

    class Seen(BaseModel):
        @model_validator(mode="after")
        def note(self) -> "Seen":
            threads.append(threading.get_ident())
            return self

    app = FastAPI()
    bound_parsing(app)

    @app.post("/")
    async def route(request: Request) -> None:
        await read_body(request, Seen, 1_000_000)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://router"
    ) as client:
        response = await client.post("/", json={"a": "x" * size})
    assert response.status_code == 200
    assert [thread == threading.get_ident() for thread in threads] == [is_inline]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ('{"prompt": "a: b", "prompt": [1]}', "prompt"),
        ('{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "1"),
        ('{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
        ('{"prompt": "a", "pro\\u006dpt": "b"}', "prompt"),
        ('{"prompt": "a", "%s": 1, "%s": 2}' % (2 * ("x" * 1000,)), "x" * 60),
        ('{"prompt": "a", "": 1, "": 2}', '""'),
        ('{"prompt": "a", " \\n": 1, " \\n": 2}', r'" \n"'),
    ],
)
async def test_a_key_that_comes_twice_is_refused_by_its_name(
    shared_world: World, body: str, name: str
) -> None:
    for route in ("completions", "chat/completions"):
        response = await shared_world.http.post(f"/v1/{route}", content=body)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["message"]) == (
            name,
            f"{name}: it is given twice in one object",
        )


@pytest.mark.parametrize("text", ["a", ":" * 100, '":"' * 100, '\\" : "'])
async def test_colons_in_a_text_are_no_keys(shared_world: World, text: str) -> None:
    assert (await shared_world.complete(prompt=text, max_tokens=1)).status_code == 200


async def test_texts_beyond_a_megabyte_are_not_read_twice(shared_world: World) -> None:
    body = {"tokens": [5], "model": None, "user": ":" * MAX_READ_TWICE}
    content = json.dumps(body)[:-1] + ', "model": "tiny"}'
    response = await shared_world.http.post("/detokenize", content=content)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("coding", "status"),
    [("identity", 200), ("IDENTITY", 200), ("gzip", 415), ("identity, br", 415), ("x" * 999, 415)],
)
async def test_an_encoded_body_is_refused_by_its_encoding(
    shared_world: World, coding: str, status: int
) -> None:
    response = await shared_world.http.post(
        "/v1/completions", json=GOOD, headers={"Content-Encoding": coding}
    )
    assert response.status_code == status
    if status != 200:
        message = str(error_of(response)["message"])
        assert f"Content-Encoding: got {coding.split(', ')[-1]!r}"[:90] in message
        assert len(message) < 250
        assert response.headers["accept-encoding"] == "identity"


async def test_a_client_that_waits_to_be_told_to_go_on_is_told(shared_world: World) -> None:
    body = json.dumps(GOOD).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(body)
    host, _, port = shared_world.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_another_expectation_is_refused_by_its_name(shared_world: World) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Length: 30\r\nExpect: 200-ok\r\n\r\n"
    heard = await say(shared_world.router.http_address, head)
    assert heard.status == 417
    assert heard.message.endswith("Expect: got '200-ok', only 100-continue is known")


async def test_another_transfer_coding_is_refused_by_its_name(shared_world: World) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    heard = await say(shared_world.router.http_address, head)
    assert heard.status == 400
    assert heard.message.endswith("Transfer-Encoding: got 'gzip', only chunked is known")
