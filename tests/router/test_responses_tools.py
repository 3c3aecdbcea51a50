"""Tools and schemas of /v1/responses as the openai package sees them; the node says what the test
wants.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from pdserve.core.request import GrammarKind
from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import World, WorldMaker
from tests.router.scripted import ASK, CALL, FUNCTION, Say, openai_client, scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: Any = {"type": "function", **FUNCTION, "strict": True}


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


def shapes(output: list[Any]) -> list[tuple[str, object]]:
    """What each item says or calls."""
    return [
        (item.name, json.loads(item.arguments))
        if item.type == "function_call"
        else (item.type, item.content[0].text)
        for item in output
    ]


PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, [PARIS]),
        (f"{CALL}\n{CALL}", [PARIS, PARIS]),
        (f"I look it up.\n{CALL}", [("message", "I look it up."), PARIS]),
        ("I do not know <that>.", [("message", "I do not know <that>.")]),
        ("", [("message", "")]),
    ],
)
async def test_an_answers_items_are_what_it_says_and_calls_whole_and_streamed(
    client: AsyncOpenAI, say: Say, text: str, expected: list[tuple[str, object]]
) -> None:
    say(text)
    whole = await client.responses.create(model="tiny", input=ASK, tools=[WEATHER])
    assert whole.status == "completed"
    assert shapes(whole.output) == expected
    assert {item.status for item in whole.output} == {"completed"}  # type: ignore[union-attr]
    ids = [item.id for item in whole.output]
    assert len(set(ids)) == len(ids)
    async with client.responses.stream(model="tiny", input=ASK, tools=[WEATHER]) as stream:
        streamed = await stream.get_final_response()
    assert shapes(streamed.output) == expected


async def test_the_events_of_a_call_are_openais_in_their_order(
    client: AsyncOpenAI, say: Say
) -> None:
    say(f"I look.\n{CALL}")
    stream = await client.responses.create(model="tiny", input=ASK, tools=[WEATHER], stream=True)
    events: list[Any] = [event async for event in stream]
    names = list(
        dict.fromkeys((event.type, getattr(event, "output_index", None)) for event in events)
    )
    assert names == [
        ("response.created", None),
        ("response.in_progress", None),
        ("response.output_item.added", 0),
        ("response.content_part.added", 0),
        ("response.output_text.delta", 0),
        ("response.output_text.done", 0),
        ("response.content_part.done", 0),
        ("response.output_item.done", 0),
        ("response.output_item.added", 1),
        ("response.function_call_arguments.delta", 1),
        ("response.function_call_arguments.done", 1),
        ("response.output_item.done", 1),
        ("response.completed", None),
    ]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(deltas) == done.arguments
    added = [e.item for e in events if e.type == "response.output_item.added"]
    assert (added[1].name, added[1].arguments, added[1].status) == (
        "get_weather",
        "",
        "in_progress",
    )
    items = [e.item for e in events if e.type == "response.output_item.done"]
    assert items == events[-1].response.output
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("text", "told"),
    [(f"I look.\n{CALL}", "I look."), (CALL, ""), ("No <that>.", "No <that>.<|end|>")],
)
async def test_logprobs_are_those_of_what_is_said(
    client: AsyncOpenAI, say: Say, text: str, told: str
) -> None:
    say(text)
    asked: Any = {"model": "tiny", "input": ASK, "tools": [WEATHER], "top_logprobs": 2}
    whole: Any = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        streamed: Any = await stream.get_final_response()
    for answer in (whole, streamed):
        messages = [item for item in answer.output if item.type == "message"]
        items = [item for each in messages for item in each.content[0].logprobs]
        assert "".join(item.token for item in items) == told
        assert all(len(item.top_logprobs) == 2 for item in items)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_forced_call_is_a_grammar_for_the_node(
    client: AsyncOpenAI, world: World, say: Say, choice: Any
) -> None:
    say(CALL)
    answer: Any = await client.responses.create(
        model="tiny", input=ASK, tools=[WEATHER], tool_choice=choice
    )
    assert shapes(answer.output) == [PARIS]
    (request,) = world.decode[0].submitted
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.LARK
    assert answer.to_dict()["tool_choice"] == choice


async def test_a_choice_of_none_leaves_calls_as_text(client: AsyncOpenAI, say: Say) -> None:
    say(CALL)
    answer = await client.responses.create(
        model="tiny", input=ASK, tools=[WEATHER], tool_choice="none"
    )
    assert answer.output_text == CALL


async def test_without_parallel_calls_one_is_given(client: AsyncOpenAI, say: Say) -> None:
    say(f"{CALL}\n{CALL}")
    answer = await client.responses.create(
        model="tiny", input=ASK, tools=[WEATHER], parallel_tool_calls=False
    )
    assert shapes(answer.output) == [PARIS]
    assert answer.parallel_tool_calls is False


async def test_a_calls_result_goes_back_with_the_calls_before_it(
    client: AsyncOpenAI, world: World, tokenizer: Tokenizer, say: Say
) -> None:
    say(f"I look.\n{CALL}")
    first: Any = await client.responses.create(model="tiny", input=ASK, tools=[WEATHER])
    said = [item.to_dict() for item in first.output]
    result = {
        "type": "function_call_output",
        "call_id": first.output[1].call_id,
        "output": "Sunny",
    }
    messages: Any = [{"role": "user", "content": ASK}, *said, result]
    await client.responses.create(model="tiny", input=messages, tools=[WEATHER])
    prompt = tokenizer.decode(world.decode[0].submitted[-1].token_ids, skip_special_tokens=False)
    told = prompt[prompt.index(ASK) :]
    parts = ["I look.", "get_weather", '"Paris"', "<tool_response>\nSunny\n</tool_response>"]
    places = [told.index(part) for part in parts]
    assert places == sorted(places)


class City(BaseModel):
    name: str


@pytest.mark.parametrize(
    "text_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "city", "strict": True, "schema": {"type": "object"}},
    ],
)
async def test_a_format_of_the_text_is_a_grammar_for_the_node(
    client: AsyncOpenAI, world: World, say: Say, text_format: Any
) -> None:
    say('{"name": "Paris"}')
    answer = await client.responses.create(model="tiny", input=ASK, text={"format": text_format})
    assert json.loads(answer.output_text) == {"name": "Paris"}
    (request,) = world.decode[0].submitted
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(request.grammar.text) == {"type": "object"}


async def test_the_packages_parsing_helper(client: AsyncOpenAI, say: Say) -> None:
    say('{"name": "Paris"}')
    answer = await client.responses.parse(model="tiny", input=ASK, text_format=City)
    assert answer.output_parsed == City(name="Paris")
