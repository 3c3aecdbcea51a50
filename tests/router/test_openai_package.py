"""The official ``openai`` package, unchanged, against a router before a fake node."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.router.conftest import ANSWER, World
from tests.router.scripted import openai_client

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(world) as made:
        yield made


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, seed=1, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER, ANSWER]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(item.token for item in logprobs.content).startswith(ANSWER)
    assert bytes(logprobs.content[0].bytes or []).decode() == logprobs.content[0].token
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streamed_chat_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None


async def test_the_streaming_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=100, stop=["jumps"], logprobs=1, echo=False
    )
    assert [choice.text for choice in answer.choices] == ["The quick brown fox "] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) > 0


async def test_streamed_completions(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt=[1, 2, 3], max_tokens=100, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "pdserve"


async def test_errors_have_the_classes_that_users_catch(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        await client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=HELLO, top_p=2)
    assert caught.value.param == "top_p"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


async def test_vllms_fields_go_through_extra_body(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="Hi", extra_body={"top_k": 3, "return_token_ids": True}
    )
    assert answer.choices[0].to_dict()["token_ids"]


async def test_responses(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(
        model="tiny", input="Hello", instructions="Be kind", max_output_tokens=100, temperature=0
    )
    assert answer.output_text == ANSWER
    assert (answer.status, answer.instructions) == ("completed", "Be kind")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_streamed_responses(client: AsyncOpenAI) -> None:
    stream = await client.responses.create(model="tiny", input="Hello", stream=True)
    events = [event async for event in stream]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == ANSWER


async def test_the_streaming_helper_of_responses(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model="tiny", input="Hello") as stream:
        final = await stream.get_final_response()
    assert final.output_text == ANSWER


async def test_a_response_goes_on_as_the_next_ones_input(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="Hello")
    said = [item.to_dict() for item in first.output]
    messages = [{"role": "user", "content": "Hello"}, *said, {"role": "user", "content": "More"}]
    answer = await client.responses.create(model="tiny", input=messages)  # type: ignore[arg-type]
    assert answer.output_text == ANSWER


async def test_a_wrong_field_of_a_response_is_a_bad_request(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="Hello", background=True)
    assert caught.value.param == "background"


async def test_labels_of_a_call_go_through(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        max_completion_tokens=100,
    )
    assert answer.choices[0].message.content == ANSWER
