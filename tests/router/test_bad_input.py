"""Whatever a client sends, the answer is a 4xx that names the trouble, and the router goes on."""

import json
import string
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from router.openai_schema import UNSUPPORTED, ChatBody, CompletionBody
from router.responses_schema import ResponsesBody
from router.unknown_fields import WITHOUT_EFFECT, WITHOUT_EFFECT_IF
from tests.fuzzing import inputs
from tests.router.conftest import World, WorldMaker, error_of

BAD_SCHEMA = {"type": "string", "format": "made-up"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}
NAMED_G = {"type": "function", "function": {"name": "g"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALL_OF_NOTHING = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 3600.0  # nobody is taken for silent while much is generated
GOOD = {"prompt": "Hello", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_world(make_world: WorldMaker) -> AsyncIterator[World]:
    async with make_world(silence_s=PATIENCE_S) as made:
        yield made


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"stop": [1, 2]}, "stop[0]"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"not a token": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "prompt[0]"),
        ({"prompt": [5] * 2000}, "prompt"),
        ({"prompt": "x " * 100_000}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "Hi"}}, "prompt"),
        ({"prompt": ["x"] * 1000}, "prompt"),
        ({"model": "no-such-model"}, "model"),
        ({"model": 5}, "model"),
        ({"seed": "abc"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"max_token": 3}, "max_token"),
        ({"made_up": [1]}, "made_up"),
        ({"messages": []}, "messages"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"suffix": "end"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"regex": "a" * 70_000}, "regex"),
        ({"ebnf": "root ::= ["}, "ebnf"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"made_up": 1}}, "structured_outputs.made_up"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_a_wrong_completion_field_is_named(
    world: World, change: dict[str, object], field: str
) -> None:
    response = await world.http.post("/v1/completions", json={**GOOD, **change})
    assert response.status_code == (404 if field == "model" and change["model"] != 5 else 400)
    error = error_of(response)
    assert error["param"] == field
    assert field in str(error["message"])
    assert not world.decode[0].submitted


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"top_logprobs": 500, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000, "max_tokens": None}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": NAMED_G}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL_OF_NOTHING]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"messages": [{"role": "user", "content": "a", "contents": "b"}]}, "messages[0].contents"),
        ({"tools": [{"type": "function", "functoin": {}}]}, "tools[0].functoin"),
        ({"response_format": {"type": "json_object", "schemaa": {}}}, "response_format.schemaa"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),  # and max_tokens 2
    ],
)
async def test_a_wrong_chat_field_is_named(
    world: World, change: dict[str, object], field: str
) -> None:
    response = await world.http.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == field
    assert field in str(error["message"])


async def test_two_different_lengths_are_refused_by_both_names(world: World) -> None:
    both = {**CHAT, "max_tokens": 2, "max_completion_tokens": 3}
    response = await world.http.post("/v1/chat/completions", json=both)
    message = str(error_of(response)["message"])
    assert message.startswith("max_completion_tokens: got 3, and max_tokens 2:")


@pytest.mark.parametrize("values", [(2, 2), (2, None), (None, 2)])
async def test_the_same_length_by_both_names_is_served(
    world: World, values: tuple[int | None, int | None]
) -> None:
    both = dict(zip(("max_tokens", "max_completion_tokens"), values, strict=True))
    response = await world.http.post("/v1/chat/completions", json={**CHAT, **both})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", ["/v1/no/such/path", "/v1/completions/x", "/%ff%fe"])
async def test_an_unknown_path_is_not_found(world: World, path: str) -> None:
    response = await world.http.post(path, json=GOOD)
    assert response.status_code == 404
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "change",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"made_up": None},
        dict.fromkeys(WITHOUT_EFFECT, "anything"),
        *[{field: value} for field, values in WITHOUT_EFFECT_IF.items() for value in values],
    ],
)
async def test_what_changes_no_answer_is_let_through(
    world: World, change: dict[str, object]
) -> None:
    assert (await world.complete(max_tokens=1, **change)).status_code == 200


async def test_a_slip_of_the_pen_is_told_the_nearest_name(world: World) -> None:
    answer = await world.complete(max_tokns=1, **{"x" * 1000: 1})
    assert "did you mean 'max_tokens'?" in str(error_of(answer)["message"])
    assert len(str(error_of(await world.complete(**{"x" * 1000: 1}))["message"])) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"best_of": 1},
        {"n": 2, "best_of": 2},
        {"suffix": ""},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        dict.fromkeys(UNSUPPORTED),
        dict.fromkeys(CompletionBody.model_fields.keys() - GOOD.keys()),
    ],
)
async def test_what_asks_for_nothing_special_is_let_through(
    world: World, change: dict[str, object]
) -> None:
    assert (await world.complete(max_tokens=1, **change)).status_code == 200


STARTS: dict[str, dict[str, object]] = {
    "completions": GOOD,
    "chat/completions": CHAT,
    "responses": {"input": "Hello"},
}
FIELDS = sorted(
    {
        *CompletionBody.model_fields,
        *ChatBody.model_fields,
        *UNSUPPORTED,
        *ResponsesBody.model_fields,
    }
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "tiny", "Hello", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "include_usage"])
            | st.text(string.printable, max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)


@inputs(80)
@pytest.mark.fuzz
@given(body=BODIES, good=st.booleans(), route=st.sampled_from([*STARTS]))
async def test_no_generated_body_is_a_server_error(
    shared_world: World, body: dict[str, object], good: bool, route: str
) -> None:
    content = json.dumps({**(STARTS[route] if good else {}), **body})
    response = await shared_world.http.post(f"/v1/{route}", content=content.encode())
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert error_of(response)["message"]


async def test_good_requests_are_served_afterwards(world: World) -> None:
    assert (await world.complete(max_tokens=100)).json()["choices"][0]["finish_reason"] == "stop"
    assert (await world.status())["requests"] == 0
