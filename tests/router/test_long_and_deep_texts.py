"""JSON in texts of a request: what is very long is not parsed, what is nested very deeply is named.

Parsing holds up everybody else, and what recurses ends in an error of Python's own.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pdserve.core.config import LimitsConfig
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.text.nesting import MAX_DEPTH
from router.tool_use import MAX_ARGUMENTS_CHARS, MAX_PARAMETERS_BYTES
from tests.router.conftest import World, WorldMaker, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = LimitsConfig().max_grammar_bytes
LONG = 14 << 20
USER = {"role": "user", "content": "a"}
AUTO, REQUIRED = "auto", "required"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_world(make_world: WorldMaker) -> AsyncIterator[World]:
    """With a context for prompts of deep schemas."""
    async with make_world(max_model_len=4096) as made:
        yield made


def items(depth: int) -> str:
    """A schema of arrays of arrays."""
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}


def called_before(arguments: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return {"input": [USER, call, {"type": "function_call_output", "call_id": "1", "output": "a"}]}


async def post(world: World, route: str, body: dict[str, Any], value: str) -> tuple[int, str]:
    """The status, and what is wrong; ``value`` is the JSON in place of "@"."""
    content = json.dumps(body).replace('"@"', value)
    response = await world.http.post(f"/v1/{route}", content=content)
    is_error = response.status_code != 200
    return response.status_code, str(error_of(response)["message"]) if is_error else ""


SCHEMA_TEXTS: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "a", "guided_json": "@"}, "guided_json"),
    ("completions", {"prompt": "a", "json_schema": "@"}, "json_schema"),
    ("chat/completions", {"messages": [USER], "guided_json": "@"}, "guided_json"),
    (
        "chat/completions",
        {"messages": [USER], "structured_outputs": {"json": "@"}},
        "structured_outputs.json",
    ),
    (
        "chat/completions",
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"schema": "@"}},
        },
        "response_format.json_schema.schema",
    ),
    (
        "chat/completions",
        {"messages": [USER], "guided_json": "@", "tools": [tool({})], "tool_choice": AUTO},
        "guided_json",
    ),
    (
        "responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": "@"}}},
        "text.format.schema",
    ),
]


@pytest.mark.parametrize(("route", "body", "field"), SCHEMA_TEXTS)
async def test_a_schemas_text_beyond_the_limit_is_not_parsed(
    world: World, route: str, body: dict[str, Any], field: str
) -> None:
    """What is wrong at its end nobody sees."""
    text = '{"a": {}, "a": ' + " " * LONG + "]"
    told = await post(world, route, body, json.dumps(text))
    assert told == (400, f"{field}: got {len(text)} bytes, at most {MOST} are allowed")


@pytest.mark.parametrize("size", [MOST, MOST + 1])
async def test_a_schemas_text_up_to_the_limit_is(world: World, size: int) -> None:
    text = '{"type": "null"}'.ljust(size)
    response = await world.complete(guided_json=text, max_tokens=1)
    assert response.status_code == (200 if size == MOST else 400)


@pytest.mark.parametrize(
    ("route", "make", "field"),
    [
        ("chat/completions", called, "messages[1].tool_calls"),
        ("responses", called_before, "input[1].arguments"),
    ],
)
async def test_arguments_beyond_the_limit_are_not_parsed(
    world: World, route: str, make: Callable[[str], dict[str, Any]], field: str
) -> None:
    assert await post(world, route, make("{" + " " * LONG), "") == (
        400,
        f"{field}: with it the conversation's calls have {LONG + 1} characters of arguments, "
        f"at most {MAX_ARGUMENTS_CHARS} are allowed",
    )


async def test_arguments_of_several_calls_are_counted_together(world: World) -> None:
    half = "{}".ljust(MAX_ARGUMENTS_CHARS // 2)
    calls = called_before(half)["input"]
    for num_calls, status in ((2, 200), (3, 400)):
        asked = {"input": [*calls[1:] * num_calls, USER], "max_output_tokens": 1}
        response = await world.http.post("/v1/responses", json=asked)
        assert response.status_code == status, response.text


@pytest.mark.parametrize("kind", ["object", "answer"])
async def test_schemas_beside_tools_are_measured_before_they_are_looked_into(
    world: World, kind: str
) -> None:
    schema = {"enum": [2**53 + 1], "description": "a" * MOST}
    fields = {"guided_json": schema, "tools": [tool({})]}
    if kind == "object":
        fields = {"tools": [tool(schema)], "tool_choice": REQUIRED}
    response = await world.chat(**fields)
    assert response.status_code == 400
    assert f"bytes{' of parameters' if kind == 'object' else ''}, at most {MOST}" in response.text


DEPTHS = [MAX_DEPTH, MAX_DEPTH + 1, 190, 480, 600, 900, 5000]


def is_told(depth: int, status: int, message: str, field: str) -> bool:
    """An answer, or a refusal by name."""
    if depth <= MAX_DEPTH:
        return status == 200
    return status == 400 and message.startswith(f"{field}: it is nested too deeply")


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("route", "body", "field"), SCHEMA_TEXTS)
async def test_a_schemas_text_that_is_nested_too_deeply_is_named(
    world: World, depth: int, route: str, body: dict[str, Any], field: str
) -> None:
    told = await post(world, route, body, json.dumps(items(depth)))
    assert is_told(depth, *told, field), told


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("choice", [AUTO, REQUIRED])
@pytest.mark.parametrize("answer", [None, "guided_json"])
async def test_a_tools_schema_that_is_nested_too_deeply_is_named(
    world: World, depth: int, choice: str, answer: str | None
) -> None:
    """Beyond 200 it is no body at all."""
    body: dict[str, Any] = {
        "messages": [USER],
        "tools": [tool("@")],
        "tool_choice": choice,
        "max_tokens": 1,
    }
    if answer is not None and choice == AUTO:
        body[answer] = {"type": "null"}
    status, message = await post(world, "chat/completions", body, items(depth))
    if depth > 190:
        assert status == 400
        assert message.startswith("body: it is no JSON: recursion limit exceeded")
    else:
        assert is_told(depth, status, message, "tools[0].function.parameters"), message


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("route", "make", "field"),
    [
        ("chat/completions", called, "messages[1].tool_calls[0].function.arguments"),
        ("responses", called_before, "input[1].arguments"),
    ],
)
async def test_arguments_that_are_nested_too_deeply_are_named(
    world: World, depth: int, route: str, make: Callable[[str], dict[str, Any]], field: str
) -> None:
    told = await post(world, route, make(items(depth)), "")
    assert is_told(depth, *told, field), told


def chat(*tools: pb.Tool, arguments: str | None = None, **fields: Any) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content="a")]
    if arguments is not None:
        call = pb.ToolCall(id="1", name="f", arguments=arguments)
        messages.append(pb.ChatMessage(role="assistant", tool_calls=[call]))
    asked = pb.ChatMessages(messages=messages, tools=tools, tool_choice=fields.pop("choice", AUTO))
    return pb.GenerateRequest(chat=asked, sampling=pb.SamplingParams(max_tokens=1, **fields))


BY_GRPC: list[tuple[Callable[[str], pb.GenerateRequest], str]] = [
    (lambda text: chat(json_schema=text), "json_schema"),
    (lambda text: chat(pb.Tool(name="f"), json_schema=text), "json_schema"),
    (lambda text: chat(pb.Tool(name="f", parameters=text)), "tools[0].parameters"),
    (
        lambda text: chat(pb.Tool(name="f", parameters=text), choice=REQUIRED),
        "tools[0].parameters",
    ),
    (lambda text: chat(arguments=text), "messages[1].tool_calls[0].function.arguments"),
]


async def by_grpc(world: World, request: pb.GenerateRequest) -> tuple[int, str]:
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        try:
            assert [each async for each in stub.Generate(request)]
        except grpc.aio.AioRpcError as error:
            told = 400 if error.code() is grpc.StatusCode.INVALID_ARGUMENT else 500
            return told, error.details() or ""
        return 200, ""


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("make", "field"), BY_GRPC)
async def test_over_grpc_what_is_nested_too_deeply_is_named(
    world: World, depth: int, make: Callable[[str], pb.GenerateRequest], field: str
) -> None:
    told = await by_grpc(world, make(items(depth)))
    assert is_told(depth, *told, field), told


@pytest.mark.parametrize(("make", "field"), BY_GRPC)
async def test_over_grpc_texts_beyond_the_limit_are_not_parsed(
    world: World, make: Callable[[str], pb.GenerateRequest], field: str
) -> None:
    status, message = await by_grpc(world, make("{" + " " * LONG))
    most = {
        "json_schema": f"{LONG + 1} bytes, at most {MOST} are",
        "tools[0].parameters": f"{LONG + 1} bytes of parameters, at most {MAX_PARAMETERS_BYTES}",
    }
    expected = most.get(field, f"at most {MAX_ARGUMENTS_CHARS} are allowed")
    assert status == 400
    assert expected in message
    assert message.startswith(field.partition("[")[0])
