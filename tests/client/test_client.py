"""The Python client, sync and async, against a router before a fake node."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from pdserve.client.async_client import AsyncClient
from pdserve.client.client import Client
from pdserve.client.results import Completion
from pdserve.core.errors import (
    InvalidRequestError,
    NeverFitsError,
    NoNodeError,
    OverloadedError,
    UnknownModelError,
)
from pdserve.core.request import Request, RouteTaken
from tests.router.conftest import ANSWER, World, until
from tests.router.fake_nodes import CACHED_TOKENS, FakeDecodeNode, FakeSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

Result = TypeVar("Result")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(world.router.grpc_address) as made:
        yield made


async def in_thread(world: World, call: Callable[[Client], Result]) -> Result:
    """What a program without an event loop sees; the router runs on this loop meanwhile."""

    def work() -> Result:
        with Client(world.router.grpc_address) as client:
            return call(client)

    return await asyncio.to_thread(work)


async def test_an_answer_has_text_tokens_usage_and_timeline(
    world: World, client: AsyncClient
) -> None:
    answer = await client.generate("Hello", timeline=True, temperature=0, logprobs=1)
    assert answer.text == ANSWER
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.token_ids == world.decode[0].answer_ids
    assert len(choice.logprobs) == len(choice.token_ids)
    assert choice.logprobs[0].sampled.logprob == -0.5
    assert len(choice.logprobs[0].top) == 1
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert answer.timeline is not None
    assert answer.timeline.route is RouteTaken.LOCAL
    assert answer.usage.cached_tokens == answer.timeline.cached_tokens == CACHED_TOKENS


async def test_a_cache_salt_reaches_the_node(world: World, client: AsyncClient) -> None:
    await client.generate("Hello", cache_salt="mine", max_tokens=1)
    assert world.decode[0].submitted[0].cache_salt == b"mine"
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        await client.generate("Hello", cache_salt="", max_tokens=1)


@pytest.mark.parametrize("prompt", ["Hello", [5, 6, 7], HELLO])
async def test_a_prompt_is_a_text_ids_or_messages(
    world: World, client: AsyncClient, prompt: Any
) -> None:
    assert (await client.generate(prompt, max_tokens=100)).text == ANSWER
    synced: Completion = await in_thread(world, lambda c: c.generate(prompt, max_tokens=100))
    assert synced.text == ANSWER
    first, second = world.decode[0].submitted
    assert first.token_ids == second.token_ids


async def test_streams_join_to_the_answer(world: World, client: AsyncClient) -> None:
    chunks = [chunk async for chunk in client.generate("Hello", stream=True, max_tokens=100)]
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert chunks[-1].usage is not None
    synced = await in_thread(
        world, lambda c: list(c.generate("Hello", stream=True, max_tokens=100))
    )
    assert "".join(chunk.text for chunk in synced) == ANSWER


async def test_choices_come_apart_and_options_arrive(world: World, client: AsyncClient) -> None:
    answer = await client.generate(
        "Hello", n=2, stop=["jumps"], top_k=5, logit_bias={3: 1.5}, seed=9
    )
    assert [choice.text for choice in answer.choices] == ["The quick brown fox "] * 2
    assert answer.choices[1].stop_reason == "jumps"
    sampling = world.decode[0].submitted[0].sampling
    assert (sampling.top_k, sampling.logit_bias, sampling.seed) == (5, ((3, 1.5),), 9)


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"top_p": 2.0}, InvalidRequestError, "top_p"),
        ({"max_tokens": -1}, InvalidRequestError, "max_tokens"),
        ({"temperature": "hot"}, InvalidRequestError, "temperature"),
        ({"max_tokens": 5000}, NeverFitsError, "max_tokens"),
        ({"model": "other"}, UnknownModelError, None),
        ({"made_up": 1}, TypeError, None),
    ],
)
async def test_errors_are_pdserves_own(
    world: World,
    client: AsyncClient,
    options: dict[str, Any],
    error: type[Exception],
    field: str | None,
) -> None:
    with pytest.raises(error) as caught:
        await client.generate("Hello", **options)
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.field == field
    with pytest.raises(error):
        await in_thread(world, lambda c: c.generate("Hello", **options))


@pytest.mark.parametrize("prompt", ["", [], [10**12], [{"role": "user"}], [{"x": "y"}, 5]])
async def test_a_wrong_prompt_is_an_invalid_request(client: AsyncClient, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        await client.generate(prompt)


async def test_overload_says_when_to_come_again(world: World, client: AsyncClient) -> None:
    async def refuse(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.fail(request, "overloaded_error", "no room", retryable=False)

    world.decode[0].behave = refuse
    with pytest.raises(OverloadedError, match="no room") as caught:
        await client.generate("Hello")
    assert caught.value.retry_after_s == 1.0


async def test_nobody_there_is_no_node() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(NoNodeError):
            await client.model_info()


async def one_token(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:2])


async def test_leaving_a_stream_aborts(world: World, client: AsyncClient) -> None:
    node = world.decode[0]
    node.behave = one_token
    stream = client.generate("Hello", stream=True)
    await anext(stream)
    await stream.aclose()
    await until(lambda: len(node.aborted) == 1)

    def leave(client: Client) -> None:
        for _ in client.generate("Hello", stream=True):
            break

    await in_thread(world, leave)
    await until(lambda: len(node.aborted) == 2)


async def test_abort_ends_a_stream_from_elsewhere(world: World, client: AsyncClient) -> None:
    world.decode[0].behave = one_token
    stream = client.generate("Hello", stream=True)
    first = await anext(stream)
    assert await client.abort(first.request_id)
    rest = [chunk async for chunk in stream]
    assert rest[-2].finish_reason == "abort"
    assert not await client.abort(first.request_id)
    assert not await in_thread(world, lambda c: c.abort("never was"))


async def test_the_rest_of_the_api(world: World, client: AsyncClient) -> None:
    model = await client.model_info()
    assert (model.model, model.max_model_len) == ("tiny", 512)
    assert (await client.server_info()).ready
    (load,) = await client.loads()
    assert (load.node, load.total_blocks) == ("decode-0", 1000)
    ids = await client.tokenize("The fox")
    assert await client.detokenize(ids) == "The fox"
    assert len(await client.tokenize(HELLO)) > len(ids)

    def everything(client: Client) -> tuple[object, ...]:
        ids = client.tokenize("The fox")
        return client.model_info(), client.server_info(), client.loads(), client.detokenize(ids)

    synced = await in_thread(world, everything)
    assert synced == (model, await client.server_info(), (load,), "The fox")


async def test_loads_are_watched_by_both_clients(world: World, client: AsyncClient) -> None:
    watching = client.watch_loads(interval_s=0.1)
    first, second = await anext(watching), await anext(watching)
    await watching.aclose()
    assert [load.node for load in (*first, *second)] == ["decode-0"] * 2
    assert (first[0].block_size, first[0].reason) == (16, None)
    (load,) = await in_thread(world, lambda sync: next(sync.watch_loads()))
    assert load.node == "decode-0"


async def test_the_best_of_several_answers_is_given(client: AsyncClient) -> None:
    answer = await client.generate("Hello", n=2, best_of=3)
    assert [choice.text for choice in answer.choices] == [ANSWER, ANSWER]
    assert answer.usage.completion_tokens == 3 * len(answer.choices[0].token_ids)
