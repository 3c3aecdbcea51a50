"""/v1/responses over the wire: the object, the events of a stream, and what is refused."""

import json
from typing import Any

import httpx
import pytest

from pdserve.core.request import FinishReason, Request
from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import ANSWER, World
from tests.router.fake_nodes import FakeDecodeNode, FakeSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL_ITEM: dict[str, object] = {
    "type": "function_call",
    "call_id": "1",
    "name": "f",
    "arguments": "{}",
}
JSON_FORMAT: dict[str, object] = {
    "type": "json_schema",
    "name": "a",
    "schema": {"type": "object"},
}
EVENTS_BEFORE = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
EVENTS_AFTER = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


async def ask(world: World, **fields: object) -> httpx.Response:
    return await world.http.post("/v1/responses", json={"input": "Hello", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """All events of a finished stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for item in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = item.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def prompt_text(world: World, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(world.decode[0].submitted[-1].token_ids, skip_special_tokens=False)


async def test_a_text_is_answered(world: World, tokenizer: Tokenizer) -> None:
    answer = (await ask(world, metadata={"a": "b"}, user="me", temperature=0)).json()
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in item["content"]] == [("output_text", ANSWER)]
    said = {key: answer[key] for key in ("metadata", "user", "temperature", "top_p", "store")}
    assert said == {
        "metadata": {"a": "b"},
        "user": "me",
        "temperature": 0,
        "top_p": 1.0,
        "store": False,
    }
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == len(world.decode[0].answer_ids)
    text = await prompt_text(world, tokenizer)
    assert text == "<|start|>user\nHello<|end|>\n<|start|>assistant\n"


async def test_messages_and_instructions_make_the_prompt(
    world: World, tokenizer: Tokenizer
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes?", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "Bye"}]},
    ]
    assert (await ask(world, input=messages, instructions="Be kind")).status_code == 200
    assert await prompt_text(world, tokenizer) == (
        "<|start|>system\nBe kind<|end|>\n<|start|>user\nHi<|end|>\n"
        "<|start|>assistant\nYes?<|end|>\n<|start|>user\nBye<|end|>\n<|start|>assistant\n"
    )


async def test_the_bound_on_tokens_leaves_it_incomplete(world: World) -> None:
    answer = (await ask(world, max_output_tokens=3)).json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert world.decode[0].submitted[-1].sampling.max_tokens == 3


async def test_a_stream_tells_its_parts_in_openais_order(world: World) -> None:
    events = events_of(await ask(world, stream=True))
    names = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert names[:4] == EVENTS_BEFORE
    assert names[4:-4] == ["response.output_text.delta"] * len(deltas)
    assert names[-4:] == [*EVENTS_AFTER, "response.completed"]
    assert "".join(event["delta"] for event in deltas) == events[-4]["text"] == ANSWER
    done = events[-1]["response"]
    assert done["output"] == [events[-2]["item"]]
    assert done["output"][0]["content"] == [events[-3]["part"]]
    assert done["usage"]["output_tokens"] == len(world.decode[0].answer_ids)
    assert events[0]["response"]["status"] == "in_progress"
    assert {event["response"]["id"] for event in events if "response" in event} == {done["id"]}


async def test_a_streamed_and_a_whole_response_are_the_same(world: World) -> None:
    streamed = events_of(await ask(world, stream=True, max_output_tokens=3, top_logprobs=2))[-1]
    whole = (await ask(world, max_output_tokens=3, top_logprobs=2)).json()
    assert streamed["type"] == "response.incomplete"
    differing = {"id", "created_at", "output", "usage"}
    left, right = (
        {key: value for key, value in each.items() if key not in differing}
        for each in (streamed["response"], whole)
    )
    assert left == right
    assert streamed["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_logprobs_come_where_they_are_included(world: World) -> None:
    include = ["message.output_text.logprobs"]
    answer = (await ask(world, include=include, top_logprobs=2, max_output_tokens=3)).json()
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert [(item["logprob"], len(item["top_logprobs"])) for item in logprobs] == [(-0.5, 2)] * 3
    events = events_of(await ask(world, include=include, stream=True, max_output_tokens=3))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert sum(len(event["logprobs"]) for event in deltas) == 3


async def gives_up(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    start = len(request.token_ids) - request.prompt_len
    if start == 0:
        session.say(request, 0, 0, node.answer_ids[:4])
    session.fail(request, "internal_error", "it broke", retryable=False)


async def test_a_failure_before_the_first_token_has_its_status(world: World) -> None:
    async def fails(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.fail(request, "internal_error", "it broke", retryable=False)

    world.decode[0].behave = fails
    assert (await ask(world, stream=True)).status_code == 500


async def test_a_failure_later_ends_the_stream_by_name(world: World) -> None:
    world.decode[0].behave = gives_up
    events = events_of(await ask(world, stream=True))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert "it broke" in events[-1]["response"]["error"]["message"]


async def test_an_abort_is_told_as_cancelled(world: World) -> None:
    async def stops(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.say(request, 0, 0, node.answer_ids[:4], finish=FinishReason.ABORT)

    world.decode[0].behave = stops
    assert (await ask(world)).json()["status"] == "cancelled"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].arguments"),
        ({"input": [CALL_ITEM | {"arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [CALL_ITEM | {"call_id": None}]}, "input[0].call_id"),
        ({"input": [CALL_ITEM | {"name": None}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "wizard", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": "x " * 600}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"instructions": "x" * 10**6}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": JSON_FORMAT | {"schema": 5}}}, "text.format.schema"),
        ({"text": {"format": JSON_FORMAT | {"schema": {"type": 5}}}}, "text.format.schema"),
        ({"text": {"format": JSON_FORMAT | {"strict": "yes"}}}, "text.format.strict"),
        ({"text": {"format": JSON_FORMAT | {"made_up": 1}}}, "text.format.made_up"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "name": "a"}],
                "tool_choice": {"type": "function", "name": "b"},
            },
            "tool_choice.name",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"model": "other"}, "model"),
    ],
)
async def test_a_wrong_field_is_named(world: World, change: dict[str, object], field: str) -> None:
    response = await ask(world, **change)
    assert response.status_code == (404 if field == "model" else 400)
    assert response.json()["error"]["param"] == field
    assert not world.decode[0].submitted


@pytest.mark.parametrize(
    "change",
    [
        {"store": False, "service_tier": "auto", "truncation": "disabled", "background": False},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}, "tools": []},
        {"include": ["reasoning.encrypted_content"], "stream_options": {}},
        {"reasoning": None, "previous_response_id": None, "parallel_tool_calls": True},
    ],
)
async def test_what_asks_for_nothing_special_is_let_through(
    world: World, change: dict[str, object]
) -> None:
    assert (await ask(world, **change)).status_code == 200
