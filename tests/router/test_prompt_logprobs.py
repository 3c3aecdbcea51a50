"""Log-probabilities of a prompt in the forms that clients know, and how nodes' parts are joined."""

from typing import Any

import pytest

from pdserve.client.async_client import AsyncClient
from pdserve.core.errors import InternalError
from pdserve.core.request import FinishReason, PromptLogprob, PromptOutput, Request
from pdserve.text.tokenizer import Tokenizer
from router.grpc_messages import PROMPT_TOKENS_A_MESSAGE, prompt_messages
from router.prompt_scores import PromptScores
from router.text_offsets import TextOffsets, prompt_offsets
from tests.router.conftest import World
from tests.router.fake_nodes import FakeDecodeNode, FakeSession
from tests.router.sse import events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [5, 6, 7, 8]


async def scored(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    """The prompt in two parts, then an answer of one token."""
    if request.sampling.prompt_logprobs is not None:
        session.score(request, 1, 2)
        session.score(request, 2)
    for choice in request.choices:
        session.say(request, choice, 0, [9], finish=FinishReason.LENGTH)


@pytest.fixture
def told(world: World) -> World:
    world.decode[0].behave = scored
    return world


@pytest.mark.parametrize("stream", [False, True])
async def test_vllms_form_for_completions(told: World, tokenizer: Tokenizer, stream: bool) -> None:
    answer = await told.complete(prompt=PROMPT, prompt_logprobs=1, max_tokens=1, n=2, stream=stream)
    bodies: list[Any] = events_of(answer) if stream else [answer.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert sorted(choice["index"] for choice in choices) == [0, 1]
    for choice in choices:
        first, second, *rest = choice["prompt_logprobs"]
        assert first is None
        assert second == {
            "6": {"logprob": -6.0, "rank": 3, "decoded_token": tokenizer.token_text(6)},
            "0": {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(0)},
        }
        assert len(rest) == 2
    assert told.decode[0].submitted[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_vllms_form_for_chats(told: World, stream: bool) -> None:
    answer = await told.chat(prompt_logprobs=0, max_tokens=1, n=2, stream=stream)
    bodies: list[Any] = events_of(answer) if stream else [answer.json()]
    (shown,) = (body["prompt_logprobs"] for body in bodies if "prompt_logprobs" in body)
    assert len(shown) == len(told.decode[0].submitted[0].token_ids)
    assert [item and len(item) for item in shown] == [None] + [1] * (len(shown) - 1)


async def test_a_prompt_of_one_token_has_none_but_is_told(told: World) -> None:
    answer = (await told.complete(prompt=[5], prompt_logprobs=2, max_tokens=1)).json()
    assert answer["choices"][0]["prompt_logprobs"] == [None]
    async with AsyncClient(told.router.grpc_address) as client:
        over_grpc = await client.generate([5], prompt_logprobs=2, max_tokens=1)
    assert [(item.token_id, item.logprob) for item in over_grpc.prompt_logprobs] == [(5, None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_echoed_has_its_logprobs(
    told: World, tokenizer: Tokenizer, stream: bool
) -> None:
    answer = await told.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=1, stream=stream)
    choice: Any = (events_of(answer) if stream else [answer.json()])[0]["choices"][0]
    tokens = [tokenizer.token_text(token) for token in (*PROMPT, 9)]
    assert choice["logprobs"]["tokens"] == tokens
    assert choice["logprobs"]["token_logprobs"] == [None, -6.0, -7.0, -8.0, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2  # the likeliest, and the token itself
    offsets = choice["logprobs"]["text_offset"]
    ends = [*offsets[1:], len(choice["text"])]
    assert [choice["text"][a:b] for a, b in zip(offsets, ends, strict=True)] == tokens


async def test_echo_and_prompt_logprobs_each_show_their_own_number(told: World) -> None:
    answer = await told.complete(
        prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=4, max_tokens=1, best_of=2
    )
    (choice,) = answer.json()["choices"]
    assert [len(item) for item in choice["prompt_logprobs"][1:]] == [5] * 3
    assert [len(item) for item in choice["logprobs"]["top_logprobs"][1:4]] == [2] * 3


async def test_over_grpc_they_come_before_all_else(told: World) -> None:
    async with AsyncClient(told.router.grpc_address) as client:
        stream = client.generate(PROMPT, stream=True, prompt_logprobs=2, max_tokens=1, n=2)
        chunks = [chunk async for chunk in stream]
        answer = await client.generate(PROMPT, prompt_logprobs=2, max_tokens=1, n=2)
    assert [len(chunk.prompt_logprobs) for chunk in chunks] == [4, 0, 0, 0]
    assert answer.prompt_logprobs == chunks[0].prompt_logprobs
    assert [item.token_id for item in answer.prompt_logprobs] == PROMPT
    assert [item.logprob for item in answer.prompt_logprobs] == [None, -6.0, -7.0, -8.0]
    assert [item.rank for item in answer.prompt_logprobs] == [None, 3, 3, 3]
    assert [choice.token_ids for choice in answer.choices] == [(9,), (9,)]


async def test_a_long_prompt_takes_several_messages(tokenizer: Tokenizer) -> None:
    prompt = [5 + i % 50 for i in range(2 * PROMPT_TOKENS_A_MESSAGE + 2)]
    logprobs = [PromptLogprob(logprob=-1.0, rank=1)] * (len(prompt) - 1)
    parts = [
        list(each.prompt_logprobs) for each in prompt_messages("r", prompt, logprobs, tokenizer)
    ]
    assert list(map(len, parts)) == [PROMPT_TOKENS_A_MESSAGE, PROMPT_TOKENS_A_MESSAGE, 2]
    assert [item.token_id for part in parts for item in part] == prompt


async def test_who_asks_for_none_gets_none(told: World) -> None:
    answer = (await told.complete(prompt=PROMPT, max_tokens=1, echo=True)).json()
    assert "prompt_logprobs" not in answer["choices"][0]
    assert told.decode[0].submitted[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("value", [21, -1, True, "1"])
@pytest.mark.parametrize("route", ["complete", "chat"])
async def test_a_number_out_of_range_is_named(world: World, route: str, value: object) -> None:
    ask = world.complete if route == "complete" else world.chat
    answer = await ask(prompt_logprobs=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


async def lost_in_the_prompt(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    if request.attempt == 0:
        session.score(request, 1, 3)
        session.break_off()
    else:
        await scored(node, session, request)


async def lost_after_a_token(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    if request.attempt == 0:
        session.score(request)
        session.say(request, 0, 0, [9])
        session.break_off()
    else:
        session.say(request, 0, 1, [9], finish=FinishReason.LENGTH)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("trouble", [lost_in_the_prompt, lost_after_a_token])
async def test_after_a_death_none_is_missing_and_none_comes_twice(
    pair: World, trouble: Any, stream: bool
) -> None:
    for node in pair.decode:
        node.behave = trouble
    answer = await pair.complete(prompt=PROMPT, echo=True, logprobs=0, max_tokens=2, stream=stream)
    bodies: list[Any] = events_of(answer) if stream else [answer.json()]
    told = [body["choices"][0]["logprobs"] for body in bodies]
    logprobs = [logprob for each in told if each for logprob in each["token_logprobs"]]
    assert logprobs[:5] == [None, -6.0, -7.0, -8.0, -0.5]
    again = [r for node in pair.decode for r in node.submitted if r.attempt == 1]
    is_asked_again = [request.sampling.prompt_logprobs is not None for request in again]
    assert is_asked_again == [trouble is lost_in_the_prompt]


def part(index: int, *tokens: int) -> PromptOutput:
    logprobs = tuple(PromptLogprob(logprob=-float(token), rank=1) for token in tokens)
    return PromptOutput(request_id="r", attempt=0, index=index, logprobs=logprobs)


async def test_parts_that_come_again_are_not_taken_twice() -> None:
    scores = PromptScores(4)
    for each in (part(1, 6), part(1, 6, 7), part(3, 8), part(2, 7)):
        scores.add(each)
    first = scores.first_seen(0)
    assert first is not None
    assert [item.logprob for item in first] == [-6.0, -7.0, -8.0]
    assert scores.first_seen(0) is None
    assert scores.first_seen(1) == first


async def test_parts_that_never_came_are_a_fault_by_name() -> None:
    scores = PromptScores(4)
    scores.add(part(2, 7))
    with pytest.raises(InternalError, match="0 prompt tokens came, not of 3"):
        scores.first_seen(0)


async def test_offsets_are_places_in_the_text_also_where_tokens_are_parts_of_characters(
    tokenizer: Tokenizer,
) -> None:
    prompt, said = (tokenizer.encode(text, add_special_tokens=False) for text in ("aé😀b", "ü c"))
    assert tokenizer.eos_token_id is not None
    begun = (tokenizer.eos_token_id, *prompt)  # has no text
    offsets = prompt_offsets(tokenizer, begun)
    assert offsets[:2] == [0, 0]
    echoed = tokenizer.decode(begun, skip_special_tokens=True)
    of = TextOffsets(tokenizer, prompt_ids=begun, start=len(echoed), skip_special_tokens=True)
    offsets += of.of(said[:1]) + of.of(said[1:])
    text = echoed + "ü c"
    assert text[offsets[-1] :] in ("c", " c")
    assert offsets == sorted(offsets)
    assert max(offsets) < len(text)
