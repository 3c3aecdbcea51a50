"""/v1/chat/completions over real HTTP, before a fake decode node."""

import pytest

from pdserve.text.tokenizer import Tokenizer
from tests.router.conftest import ANSWER, World
from tests.router.sse import events_of, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_chat_is_rendered_by_the_models_template(
    world: World, tokenizer: Tokenizer
) -> None:
    answer = (await world.chat(temperature=0)).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt_ids = world.decode[0].submitted[0].token_ids
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    assert text == "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)


async def test_max_tokens_is_what_the_context_leaves_where_not_given(world: World) -> None:
    await world.chat()
    request = world.decode[0].submitted[0]
    assert request.sampling.max_tokens == 512 - len(request.token_ids)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_has_an_old_and_a_new_name(world: World, name: str) -> None:
    answer = (await world.chat(**{name: 3})).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_a_reason(world: World) -> None:
    events = events_of(await world.chat(stream=True))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == ANSWER
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])


async def test_each_choice_of_a_stream_has_its_role(world: World) -> None:
    events = events_of(await world.chat(stream=True, n=3))
    roles = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]
    assert [text_of(events, i) for i in range(3)] == [ANSWER] * 3


async def test_logprobs_hold_bytes_and_the_likeliest_tokens(
    world: World, tokenizer: Tokenizer
) -> None:
    answer = (await world.chat(logprobs=True, top_logprobs=2, max_tokens=4)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    expected = world.decode[0].answer_ids[:4]
    assert [bytes(item["bytes"]) for item in content] == [
        tokenizer.token_bytes(token_id) for token_id in expected
    ]
    assert [item["logprob"] for item in content] == [-0.5] * 4
    assert [[t["logprob"] for t in item["top_logprobs"]] for item in content] == [[-0.5, -1.5]] * 4


async def test_logprobs_alone_are_those_of_the_sampled_tokens(world: World) -> None:
    answer = (await world.chat(logprobs=True, max_tokens=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in content] == [[], []]


async def test_streamed_logprobs_are_complete(world: World) -> None:
    events = events_of(await world.chat(logprobs=True, stream=True))
    content = [
        item
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for item in choice["logprobs"]["content"]
    ]
    assert len(content) == len(world.decode[0].answer_ids)


async def test_a_stop_string_is_left_out_of_a_stream(world: World) -> None:
    events = events_of(await world.chat(stream=True, stop="jumps"))
    assert text_of(events) == "The quick brown fox "
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "jumps")


async def test_content_may_be_parts_of_text(world: World, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await world.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    text = tokenizer.decode(world.decode[0].submitted[0].token_ids)
    assert "one\ntwo" in text


async def test_a_developer_speaks_as_the_system_that_templates_know(
    world: World, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    await world.chat(messages=messages, max_tokens=1)
    assert tokenizer.decode(world.decode[0].submitted[0].token_ids).startswith("system\nBe brief.")


async def test_the_generation_prompt_can_be_left_out(world: World, tokenizer: Tokenizer) -> None:
    await world.chat(max_tokens=1, add_generation_prompt=False)
    text = tokenizer.decode(world.decode[0].submitted[0].token_ids)
    assert text == "user\nHello\n"


async def test_token_ids_come_where_asked_for(world: World) -> None:
    answer = (await world.chat(return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == list(world.decode[0].submitted[0].token_ids)
    assert answer["choices"][0]["token_ids"] == list(world.decode[0].answer_ids)


async def test_streamed_token_ids_and_usage_are_complete(world: World) -> None:
    *events, last = events_of(
        await world.chat(return_token_ids=True, stream=True, stream_options={"include_usage": True})
    )
    assert events[0]["prompt_token_ids"] == list(world.decode[0].submitted[0].token_ids)
    ids = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert ids == list(world.decode[0].answer_ids)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids)
