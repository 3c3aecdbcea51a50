"""Keys of objects inside a body: slips are refused by their path, what clients echo is not."""

import re
from types import ModuleType

import pytest
from openai.types import chat, responses
from pydantic import BaseModel

from pdserve.core.errors import InvalidRequestError
from router.debug_route import RouteBody
from router.http_bodies import check_body
from router.nested_keys import MAX_NAMES, Keys, check_keys
from router.openai_schema import MESSAGE_KEYS, ChatBody, CompletionBody, TokenizeBody
from router.responses_input import ITEM_KEYS
from router.responses_schema import ResponsesBody
from router.tool_use import CALL_KEYS, TOOL_KEYS

Json = dict[str, object]

CHAT: Json = {"messages": [{"role": "user", "content": "a"}]}
RESPONSES: Json = {"input": "a"}
SCHEMA: Json = {"type": "object", "propertes": {}, "require": [], "nmae": 1}


def user(**keys: object) -> Json:
    return {"messages": [{"role": "user", "content": "a", **keys}]}


def tool(**keys: object) -> Json:
    return {"type": "function", "function": {"name": "f", **keys}}


def called(**keys: object) -> Json:
    function = {"name": "f", "arguments": "{}", **keys}
    call = {"id": "1", "type": "function", "index": 0, "function": function}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("schema", "body", "path", "near"),
    [
        (ChatBody, user(contents="b"), "messages[0].contents", "content"),
        (ChatBody, user(Role="b"), "messages[0].Role", "role"),
        (ChatBody, user(toolCalls=[]), "messages[0].toolCalls", "tool_calls"),
        (ChatBody, {"messages": [{"rol": "user"}]}, "messages[0].rol", "role"),
        (ChatBody, user(content=[{"type": "text", "text": "a"}, {"typ": "text"}]),
         "messages[0].content[1].typ", "type"),
        (ChatBody, called(argument="{}"), "messages[0].tool_calls[0].function.argument",
         "arguments"),
        (TokenizeBody, user(contents="b"), "messages[0].contents", "content"),
        (RouteBody, user(contents="b"), "messages[0].contents", "content"),
        (ChatBody, {**CHAT, "tools": [tool(), tool(paramters={})]},
         "tools[1].function.paramters", "parameters"),
        (ChatBody, {**CHAT, "tools": [{**tool(), "functions": {}}]}, "tools[0].functions",
         "function"),
        (ChatBody, {**CHAT, "response_format": {"type": "json_object", "schemaa": {}}},
         "response_format.schemaa", "json_schema"),
        (ChatBody, {**CHAT, "response_format": {"type": "json_object", "schema": {}}},
         "response_format.schema", "json_schema"),
        (CompletionBody, {"prompt": "a", "response_format": {"typ": "text"}},
         "response_format.typ", "type"),
        (ChatBody, {**CHAT, "response_format": {"type": "json_schema", "json_schema":
         {"shema": {}}}}, "response_format.json_schema.shema", "schema"),
        (ResponsesBody, {"input": [{"role": "user", "contnet": "a"}]}, "input[0].contnet",
         "content"),
        (ResponsesBody, {"input": [{"role": "user", "content": [{"type": "input_text",
         "txt": "a"}]}]}, "input[0].content[0].txt", "text"),
        (ResponsesBody, {"input": [{"type": "function_call_output", "call_id": "1",
         "output": [{"tpye": "input_text"}]}]}, "input[0].output[0].tpye", "type"),
        (ResponsesBody, {**RESPONSES, "tools": [{"type": "function", "name": "f",
         "paramters": {}}]}, "tools[0].paramters", "parameters"),
        (ResponsesBody, {**RESPONSES, "text": {"fromat": {}}}, "text.fromat", "format"),
        (ResponsesBody, {**RESPONSES, "text": {"format": {"type": "json_object", "schem": {}}}},
         "text.format.schem", "schema"),
    ],
)  # fmt: skip
def test_a_slip_inside_an_object_is_told_its_path_and_the_nearest_key(
    schema: type[BaseModel], body: Json, path: str, near: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_body(schema, body)
    assert str(raised.value) == f"{path}: it is not known here; did you mean {near!r}?"
    assert raised.value.field == path


@pytest.mark.parametrize(
    ("option", "hint"),
    [("include_usag", "; did you mean 'include_usage'?"), ("zzz", "")],
)
def test_an_unknown_option_of_a_stream_is_told_the_nearest(option: str, hint: str) -> None:
    body = check_body(ChatBody, {**CHAT, "stream": True, "stream_options": {option: True}})
    with pytest.raises(InvalidRequestError) as raised:
        body.check_supported()
    assert str(raised.value) == f"stream_options.{option}: it is not known here{hint}"


ECHOED = (
    *("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content"),
    *("reasoning", "reasoning_details", "name", "cache_control", "logprobs", "id", "status"),
    *("phase", "parsed", "prefix", "partial", "thinking", "thinking_blocks", "context", "type"),
    *("provider_specific_fields", "metadata", "timestamp", "created_at", "model", "weight"),
    *("recipient", "channel", "content_type", "tool_name", "tools", "citations", "images"),
    *("index", "finish_reason", "stop_reason", "additional_kwargs", "response_metadata"),
    *("namespace", "caller", "parsed_arguments", "tool_call_id", "zzz"),
)


@pytest.mark.parametrize("name", ECHOED)
def test_what_clients_send_back_is_let_through(name: str) -> None:
    check_keys("messages", MESSAGE_KEYS, [{name: "anything"}])
    check_keys("input", ITEM_KEYS, [{name: "anything"}])


@pytest.mark.parametrize("name", ["annotations", "logprobs", "cache_control", "parsed", "id"])
def test_what_clients_send_back_of_a_part_is_let_through(name: str) -> None:
    for keys in (MESSAGE_KEYS, ITEM_KEYS):
        check_keys("messages", keys, [{"content": [{"type": "text", "text": "a", name: []}]}])


def keys_of(module: ModuleType, pattern: str) -> set[str]:
    """The keys of the package's models and typed dictionaries whose names match."""
    names: set[str] = set()
    for name, kind in vars(module).items():
        if isinstance(kind, type) and re.search(pattern, name):
            names |= getattr(kind, "__annotations__", {}).keys()
    return names


OPENAI: dict[str, tuple[Keys, set[str]]] = {
    "messages": (MESSAGE_KEYS, keys_of(chat, "Message")),
    "parts": (MESSAGE_KEYS.inside["content"], keys_of(chat, "ContentPart")),
    "calls": (CALL_KEYS, keys_of(chat, "ToolCall")),
    "functions": (CALL_KEYS.inside["function"], {"name", *keys_of(chat, "^ParsedFunction$")}),
    "tools": (TOOL_KEYS, keys_of(responses, "Tool$")),
    "items": (ITEM_KEYS, keys_of(responses, "Response(?!.*Event).*(Message|Call|Item)")),
    "texts": (ITEM_KEYS.inside["content"], keys_of(responses, "OutputText")),
}


@pytest.mark.parametrize("kind", OPENAI)
def test_every_key_that_openais_own_client_may_send_back_is_let_through(kind: str) -> None:
    keys, names = OPENAI[kind]
    assert len(names) > 1
    check_keys(kind, keys, [dict.fromkeys(names, 0)])


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatBody, {**CHAT, "tools": [tool(parameters=SCHEMA)]}),
        (ChatBody, {**CHAT, "response_format": {"type": "json_schema",
         "json_schema": {"name": "a", "schema": SCHEMA}}}),
        (ResponsesBody, {**RESPONSES, "text": {"format": {"type": "json_schema", "name": "a",
         "schema": SCHEMA}}}),
        (ResponsesBody, {**RESPONSES, "text": {"verbosity": "low"}}),
        (ChatBody, {**CHAT, "chat_template_kwargs": {"contents": 1, "rol": 2}}),
        (ChatBody, user(contents=None, rol=None)),
    ],
)  # fmt: skip
def test_schemas_and_what_is_null_are_not_looked_into(schema: type[BaseModel], body: Json) -> None:
    check_body(schema, body)


@pytest.mark.parametrize("value", [None, 5, "a", [], [5, None, [{"rol": 1}]], {}, {"content": 5}])
def test_what_is_no_object_is_left_to_its_types(value: object) -> None:
    assert check_keys("messages", MESSAGE_KEYS, value) is value


def test_no_more_than_some_strange_keys_are_compared() -> None:
    strange = {f"strange{i}": i for i in range(MAX_NAMES)}
    check_keys("messages", MESSAGE_KEYS, [strange, strange, {"contents": 1}])
    with pytest.raises(InvalidRequestError, match=r"^messages\[2\].contents: "):
        check_keys("messages", MESSAGE_KEYS, [{"strange": 1}, {"strange": 1}, {"contents": 1}])
