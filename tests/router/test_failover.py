"""Sessions that break, nodes that fail, tokens that come late: the client's stream goes on."""

import asyncio
import json
import random

import pytest

from pdserve.core.config import LimitsConfig
from pdserve.core.request import FinishReason, Request
from tests.router.conftest import ANSWER, WAIT_S, World, WorldMaker, until_reason
from tests.router.fake_nodes import (
    CACHED_TOKENS,
    Behaviour,
    FakeDecodeNode,
    FakeSession,
    answer,
    silent,
)
from tests.router.sse import events_of, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAST_ATTEMPT = 3
NUM_CALLERS = 24


def first_then_good(first: Behaviour) -> Behaviour:
    """``first`` for a request's first attempt, a good answer for later ones."""

    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        await (first if request.attempt == 0 else answer)(node, session, request)

    return behave


async def break_off(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:5])
    session.break_off()


async def fail_at_first(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.fail(request, "transfer_error", "the link broke", retryable=True)


async def fail_midway(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:5])
    session.fail(request, "transfer_error", "the link broke", retryable=True)


async def leave_a_gap(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:2])
    session.say(request, 0, 3, node.answer_ids[3:5])


async def stutter(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    """A good answer in which everything is said twice."""
    ids = node.answer_ids
    for index, token_id in enumerate(ids):
        finish = FinishReason.STOP if index + 1 == len(ids) else None
        stop_token_id = token_id if finish else None
        for _ in range(2):
            session.say(request, 0, index, [token_id], finish=finish, stop_token_id=stop_token_id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_decode", [1, 2])
@pytest.mark.parametrize("trouble", [break_off, fail_at_first, fail_midway, leave_a_gap, stutter])
async def test_no_token_is_missing_and_none_comes_twice(
    world: World, pair: World, trouble: Behaviour, num_decode: int, stream: bool
) -> None:
    used = world if num_decode == 1 else pair
    for node in used.decode:
        node.behave = first_then_good(trouble)
    response = await used.complete(max_tokens=100, stream=stream, return_token_ids=True)
    if stream:
        events = events_of(response)
        assert text_of(events) == ANSWER
        token_ids = [i for event in events for i in event["choices"][0]["token_ids"]]
    else:
        (choice,) = response.json()["choices"]
        assert choice["text"] == ANSWER
        token_ids = choice["token_ids"]
    assert token_ids == list(used.decode[0].answer_ids)


async def test_a_retry_carries_the_prompt_and_what_the_client_has(pair: World) -> None:
    for node in pair.decode:
        node.behave = first_then_good(fail_midway)
    await pair.complete(max_tokens=100, temperature=0.5)
    (first,) = [r for node in pair.decode for r in node.submitted if r.attempt == 0]
    (second,) = [r for node in pair.decode for r in node.submitted if r.attempt == 1]
    assert second.token_ids == first.token_ids + pair.decode[0].answer_ids[:5]
    assert second.prompt_len == first.prompt_len == len(first.token_ids)
    assert second.request_id == first.request_id
    assert second.sampling == first.sampling
    assert second.route.decode_node != first.route.decode_node


@pytest.mark.parametrize("num_told", [0, 1])
async def test_usage_counts_the_prompt_once_and_as_the_first_leg_that_read_it_found_it(
    world: World, num_told: int
) -> None:
    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        for _ in range(num_told):
            session.tell_timeline(request, node.address.name)
            session.say(request, 0, 0, node.answer_ids[:5])
        session.fail(request, "transfer_error", "the link broke", retryable=True)

    (node,) = world.decode
    node.behave = first_then_good(behave)
    answer = (await world.complete(max_tokens=100, timeline=True)).json()
    first, second = node.submitted
    cached = CACHED_TOKENS if num_told else len(second.token_ids) - 1
    assert answer["usage"]["prompt_tokens"] == len(first.token_ids)
    assert answer["usage"]["completion_tokens"] == len(node.answer_ids)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert answer["timeline"]["cached_tokens"] == cached


async def test_choices_that_differ_are_retried_one_by_one(world: World) -> None:
    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        if request.attempt > 0:
            await answer(node, session, request)
            return
        for choice in request.choices:
            session.say(request, choice, 0, node.answer_ids[: choice + 1])
        session.fail(request, "node_lost_error", "out of order", retryable=True)

    world.decode[0].behave = behave
    response = await world.complete(max_tokens=100, n=3)
    assert [choice["text"] for choice in response.json()["choices"]] == [ANSWER] * 3
    assert [r.choices for r in world.decode[0].submitted] == [(0, 1, 2), (0,), (1,), (2,)]
    assert [r.attempt for r in world.decode[0].submitted] == [0, 1, 2, 3]


async def test_late_tokens_of_an_earlier_attempt_are_not_heard(world: World) -> None:
    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        if request.attempt == 0:
            session.fail(request, "node_lost_error", "paused", retryable=True)
            return
        session.say(request, 0, 0, [99, 98], attempt=0)
        await answer(node, session, request)
        session.say(request, 0, 0, [97], attempt=0)

    world.decode[0].behave = behave
    response = await world.complete(max_tokens=100)
    assert response.json()["choices"][0]["text"] == ANSWER


async def always_fail(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.fail(request, "transfer_error", "the link broke", retryable=True)


async def always_break(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.break_off()


@pytest.mark.parametrize(
    ("behave", "kind"), [(always_fail, "transfer_error"), (always_break, "node_lost_error")]
)
async def test_a_request_that_always_fails_ends_by_name(
    world: World, behave: Behaviour, kind: str
) -> None:
    world.decode[0].behave = behave
    response = await world.complete()
    assert response.status_code == 503
    assert response.json()["error"]["type"] == kind
    assert world.decode[0].submitted[-1].attempt == LAST_ATTEMPT


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("never_fits_error", 400),
        ("prefill_failed_error", 503),
        ("overloaded_error", 429),
        ("rank_error", 500),
        ("of_another_version", 500),
    ],
)
async def test_a_failure_for_good_has_the_status_of_its_kind(
    world: World, kind: str, status: int
) -> None:
    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.fail(request, kind, "prompt: not here", retryable=False)

    world.decode[0].behave = behave
    response = await world.complete(stream=True)
    assert response.status_code == status
    assert response.json()["error"]["message"] == "prompt: not here"


async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(
    world: World,
) -> None:
    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.say(request, 0, 0, node.answer_ids[:3])
        await asyncio.sleep(0.05)
        session.fail(request, "rank_error", "rank 1 died", retryable=False)

    world.decode[0].behave = behave
    response = await world.complete(max_tokens=100, stream=True)
    assert response.status_code == 200
    last = response.text.split("\n\n")[-2]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["message"]) == ("rank_error", "rank 1 died")


async def end_without_a_token(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, [], finish=FinishReason.STOP)


async def fail_for_good_midway(
    node: FakeDecodeNode, session: FakeSession, request: Request
) -> None:
    session.say(request, 0, 0, node.answer_ids[:3])
    session.fail(request, "rank_error", "rank 1 died", retryable=False)


async def break_always_midway(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, len(request.token_ids) - request.prompt_len, node.answer_ids[:1])
    session.break_off()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behave", "status", "kind"),
    [
        (end_without_a_token, 503, "node_lost_error"),
        (fail_for_good_midway, 500, "rank_error"),
        (break_always_midway, 503, "node_lost_error"),
    ],
)
async def test_no_failure_looks_like_an_answer(
    world: World, behave: Behaviour, status: int, kind: str, stream: bool
) -> None:
    world.decode[0].behave = behave
    response = await world.complete(max_tokens=100, stream=stream)
    began = stream and behave is not end_without_a_token
    assert response.status_code == (200 if began else status)
    assert "[DONE]" not in response.text
    last = response.text.strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == kind


async def test_a_request_waits_for_its_only_node_to_come_back(world: World) -> None:
    node = world.decode[0]
    node.token_time_s = 0.01
    call = asyncio.create_task(world.complete(max_tokens=100))
    await node.arrivals.get()
    await asyncio.sleep(0.05)
    await node.stop()
    await asyncio.sleep(0.3)
    node.forget()
    await node.start()
    assert (await call).json()["choices"][0]["text"] == ANSWER


async def test_a_client_may_leave_while_its_request_waits_for_a_node(world: World) -> None:
    node = world.decode[0]
    node.behave = silent
    call = asyncio.create_task(world.complete(max_tokens=100))
    await node.arrivals.get()
    await node.stop()
    await until_reason(world, "decode-0")
    call.cancel()
    await world.until_idle()
    node.forget()
    await node.start()
    await world.renewed()
    assert not node.submitted
    assert (await world.complete(max_tokens=100)).json()["choices"][0]["text"] == ANSWER


async def test_after_a_storm_of_leaving_clients_and_failing_nodes_all_places_are_free(
    make_world: WorldMaker,
) -> None:
    """Requests that end well, badly, by their client or by a node: each gives its place back."""
    rng = random.Random(5)
    troubles = [answer, break_off, fail_at_first, fail_midway, leave_a_gap, stutter, always_fail]

    async def behave(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        chosen = rng.choice(troubles) if request.attempt == 0 else answer
        await chosen(node, session, request)

    async def call(world: World) -> None:
        fields: dict[str, object] = rng.choice(
            [{"stream": True}, {"n": 2}, {"stop": "fox"}, {"top_p": 7}, {"prompt": ["a", "b"]}]
        )
        try:
            async with asyncio.timeout(rng.choice([0.02, 0.1, WAIT_S])):
                response = await world.complete(max_tokens=40, **fields)
        except TimeoutError:
            return
        assert response.status_code in (200, 400, 503)

    async with make_world(
        num_decode=2, limits=LimitsConfig(max_queued_requests=NUM_CALLERS)
    ) as world:
        for node in world.decode:
            node.behave = behave
            node.token_time_s = 0.002
        for _ in range(4):
            await asyncio.gather(*(call(world) for _ in range(NUM_CALLERS // 2)))
        await (await world.renewed()).until_idle()
        answers = await asyncio.gather(*(world.complete() for _ in range(NUM_CALLERS)))
        assert [response.status_code for response in answers] == [200] * NUM_CALLERS
