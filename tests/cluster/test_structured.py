"""Structured output and tool calls on the real small model, local and disaggregated."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from pdserve.client.client import Client
from tests.cluster.conftest import LOCAL_BELOW
from tests.cluster.served import Served

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"enum": ["tea", "coffee"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
LONG = "Invent a person with a name, an age and what they like to drink, and write it as JSON."
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(cluster: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none") as client:
        yield client


def validate(text: str | None) -> None:
    assert text is not None
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 5, "n": 2, "presence_penalty": 1.0},
        {"temperature": 0.7, "seed": 6, "logprobs": True, "top_logprobs": 2},
    ],
)
@pytest.mark.parametrize("prompt", ["A person:", LONG])
def test_answers_keep_to_their_schema(
    client: openai.OpenAI, prompt: str, wishes: dict[str, Any]
) -> None:
    got = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        response_format=FORMAT,
        max_tokens=120,
        **wishes,
    )
    for choice in got.choices:
        assert choice.finish_reason == "stop"
        validate(choice.message.content)
        if wishes.get("logprobs"):
            assert choice.logprobs is not None
            assert choice.logprobs.content


@pytest.mark.parametrize("prompt", ["The answer is", "The answer to this question " * 5 + "is"])
def test_a_regular_expression_on_both_routes(cluster: Served, prompt: str) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "guided_regex": " (yes|no), [0-9]{2}!",
        "temperature": 0,
        "timeline": True,
    }
    answer = cluster.post("/v1/completions", body)
    text = answer["choices"][0]["text"]
    assert text.startswith((" yes, ", " no, "))
    assert text.endswith("!")
    is_local = answer["usage"]["prompt_tokens"] < LOCAL_BELOW
    assert answer["timeline"]["route"] == ("local" if is_local else "disaggregated")


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": LONG}],
        "response_format": FORMAT,
        "temperature": 0,
        "max_tokens": 120,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    validate(whole)


def test_the_end_of_max_tokens_is_told(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": LONG}],
        response_format=FORMAT,
        max_tokens=3,
    )
    assert answer.choices[0].finish_reason == "length"


def test_a_required_call_is_made(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=80,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_over_grpc(cluster: Served) -> None:
    with Client(cluster.grpc_address) as grpc_client:
        answer = grpc_client.generate(
            LONG, json_schema=json.dumps(SCHEMA), temperature=0, max_tokens=120
        )
    validate(answer.choices[0].text)


def test_a_bad_schema_costs_nothing_and_is_named(client: openai.OpenAI) -> None:
    bad: Any = {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": {"type": "string", "format": "made-up"}},
    }
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], response_format=bad
        )
    assert raised.value.param == "response_format.json_schema.schema"
