"""Tools over HTTP as the openai package sees them; the node says what the test wants."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from pdserve.core.request import GrammarKind
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import World, WorldMaker
from tests.router.scripted import ASK, CALL, FUNCTION, Say, openai_client, scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: Any = {"type": "function", "function": FUNCTION}
HISTORY: list[Any] = [{"role": "user", "content": ASK}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_world(make_world: WorldMaker) -> AsyncIterator[World]:
    """Tools take many tokens of a tiny tokenizer."""
    async with make_world(max_model_len=4096) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(world) as made:
        yield made


@pytest.fixture
def say(world: World, tokenizer: Tokenizer) -> Iterator[Say]:
    with scripted(world, tokenizer) as made:
        yield made


async def test_calls_are_parsed_and_end_the_answer(client: AsyncOpenAI, say: Say) -> None:
    say(f"I look it up.\n{CALL}\n{CALL}")
    answer = await client.chat.completions.create(model="tiny", messages=HISTORY, tools=[WEATHER])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up."
    calls = choice.message.tool_calls or []
    assert [call.type for call in calls] == ["function", "function"]
    assert len({call.id for call in calls}) == 2
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_streamed_calls_are_named_first_and_their_arguments_come_in_pieces(
    client: AsyncOpenAI, say: Say
) -> None:
    say(CALL)
    stream = await client.chat.completions.create(
        model="tiny", messages=HISTORY, tools=[WEATHER], stream=True
    )
    chunks = [chunk async for chunk in stream]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert calls[0].function is not None
    assert (calls[0].index, calls[0].function.name) == (0, "get_weather")
    assert calls[0].id is not None
    assert all(call.id is None for call in calls[1:])
    pieces = [call.function.arguments or "" for call in calls if call.function]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    assert len(pieces) > 2
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"
    assert not any(c.choices[0].delta.content for c in chunks)


async def test_the_packages_streaming_helper_puts_calls_together(
    client: AsyncOpenAI, say: Say
) -> None:
    say(CALL)
    async with client.chat.completions.stream(
        model="tiny", messages=HISTORY, tools=[WEATHER]
    ) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather"]


async def test_text_stays_text_beside_tools(client: AsyncOpenAI, say: Say) -> None:
    say("I do not know <that>.")
    answer = await client.chat.completions.create(model="tiny", messages=HISTORY, tools=[WEATHER])
    assert answer.choices[0].message.content == "I do not know <that>."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_forced_call_is_a_grammar_for_the_node(
    client: AsyncOpenAI, world: World, say: Say, choice: Any
) -> None:
    say(CALL)
    answer = await client.chat.completions.create(
        model="tiny", messages=HISTORY, tools=[WEATHER], tool_choice=choice
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (request,) = world.decode[0].submitted
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.LARK
    assert "get_weather" in request.grammar.text


async def test_one_call_only_where_no_others_are_wanted(client: AsyncOpenAI, say: Say) -> None:
    say(CALL + CALL)
    answer = await client.chat.completions.create(
        model="tiny", messages=HISTORY, tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1


async def test_no_calls_are_looked_for_where_none_are_wanted(client: AsyncOpenAI, say: Say) -> None:
    say(CALL)
    answer = await client.chat.completions.create(
        model="tiny", messages=HISTORY, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None


async def test_the_history_may_hold_calls_and_their_results(
    client: AsyncOpenAI, world: World, tokenizer: Tokenizer, say: Say
) -> None:
    say("It is sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    history: list[Any] = [
        *HISTORY,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 degrees"},
    ]
    answer = await client.chat.completions.create(model="tiny", messages=history, tools=[WEATHER])
    assert answer.choices[0].message.content == "It is sunny."
    (request,) = world.decode[0].submitted
    prompt = tokenizer.decode(request.token_ids, skip_special_tokens=False)
    assert "The weather of a city." in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>' in prompt
    assert "<tool_response>\nsunny, 21 degrees\n</tool_response>" in prompt


async def test_a_schema_goes_with_the_request(client: AsyncOpenAI, world: World) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "s", "schema": schema, "strict": True}
    wanted: Any = {"type": "json_schema", "json_schema": named}
    await client.chat.completions.create(
        model="tiny",
        messages=HISTORY,
        response_format=wanted,
    )
    (request,) = world.decode[0].submitted
    assert request.grammar is not None
    assert json.loads(request.grammar.text) == schema


async def test_over_grpc_calls_come_beside_the_text(world: World, say: Say) -> None:
    say(f"I look it up.\n{CALL}")
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user", content="The weather in Paris?")],
        tools=[pb.Tool(name="get_weather", parameters=json.dumps(FUNCTION["parameters"]))],
        tool_choice="get_weather",
    )
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        messages = [each async for each in stub.Generate(pb.GenerateRequest(chat=chat))]
    assert "".join(each.text for each in messages) == "I look it up."
    calls = [call for each in messages for call in each.tool_calls]
    assert calls[0].id.startswith("call_")
    assert [call.name for call in calls if call.name] == ["get_weather"]
    assert json.loads("".join(call.arguments for call in calls)) == {"city": "Paris"}
    assert [each.finish_reason for each in messages if each.finish_reason] == ["tool_calls"]
    (request,) = world.decode[0].submitted
    assert request.grammar is not None


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (pb.SamplingParams(json_schema='{"type": "null"}'), GrammarKind.JSON_SCHEMA),
        (pb.SamplingParams(json_object=True), GrammarKind.JSON_SCHEMA),
        (pb.SamplingParams(regex="a+"), GrammarKind.REGEX),
        (pb.SamplingParams(grammar='root ::= "a"'), GrammarKind.EBNF),
        (pb.SamplingParams(choice=["a", "b"]), GrammarKind.LARK),
    ],
)
async def test_over_grpc_a_grammar_goes_with_the_request(
    world: World, sampling: pb.SamplingParams, kind: GrammarKind
) -> None:
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text="Hello", sampling=sampling)
        assert [each async for each in stub.Generate(request)]
    (submitted,) = world.decode[0].submitted
    assert submitted.grammar is not None
    assert submitted.grammar.kind is kind


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(regex="(")), "regex"),
        (
            pb.GenerateRequest(text="a", sampling=pb.SamplingParams(regex="a", choice=["b"])),
            "choice",
        ),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(json_schema="[")), "json_schema"),
        (
            pb.GenerateRequest(
                chat=pb.ChatMessages(
                    messages=[pb.ChatMessage(role="user", content="a")],
                    tools=[pb.Tool(name="f", parameters="[]")],
                )
            ),
            r"tools\[0\].parameters",
        ),
    ],
)
async def test_over_grpc_what_is_wrong_is_named(
    world: World, request_: pb.GenerateRequest, field: str
) -> None:
    async with grpc.aio.insecure_channel(world.router.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as raised:
            assert [each async for each in stub.Generate(request_)]
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
