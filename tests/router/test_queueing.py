"""Requests that no node has room for: they wait at the router, in order, bounded, unspent."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
import pytest_asyncio

from pdserve.client.async_client import AsyncClient
from pdserve.core.config import LimitsConfig, PromptClass
from pdserve.core.errors import InvalidRequestError, OverloadedError, QueueDeadlineError
from pdserve.core.request import FinishReason, Request
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from tests.router.conftest import World, WorldMaker, until
from tests.router.fake_nodes import NUM_BLOCKS, FakeDecodeNode, FakeSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLASSES = (PromptClass(name="short", below=40, max_queued=4), PromptClass(name="long"))


async def at_once(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    session.say(request, 0, 0, node.answer_ids[:1], finish=FinishReason.LENGTH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_strict(make_world: WorldMaker) -> AsyncIterator[World]:
    """A router that sends nothing ahead."""
    limits = LimitsConfig(max_sent_ahead=0, kv_watermark=1.0)
    async with make_world(limits=limits, classes=CLASSES) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def strict(shared_strict: World) -> World:
    world = await shared_strict.renewed()
    world.decode[0].behave = at_once
    await tell(world, free=NUM_BLOCKS, running=0)
    return world


async def tell(world: World, *, free: int, running: int = 1) -> None:
    """The node tells its state, and the router has heard it."""
    node = world.decode[0]
    node.free_blocks, node.running = free, running
    node.tell_state()

    async with asyncio.timeout(10.0):
        while True:
            (told,) = await world.nodes()
            if (told["free_blocks"], told["running"]) == (free, running):
                return
            await asyncio.sleep(0.005)


async def waiting(world: World) -> dict[str, int]:
    queues = (await world.status())["queues"]
    assert isinstance(queues, list)
    return {queue["prompt_class"]: queue["num_waiting"] for queue in queues}


async def until_waiting(world: World, short: int, long: int = 0) -> None:
    async with asyncio.timeout(10.0):
        while await waiting(world) != {"short": short, "long": long}:
            await asyncio.sleep(0.005)


async def call(
    world: World, prompt: list[int], *, key: str | None = None, **fields: object
) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    return await world.http.post("/v1/completions", json=body, headers=headers)


async def prompts_served(world: World, number: int) -> list[int]:
    """First tokens of the prompts that reached the node, in their order there."""
    node = world.decode[0]
    await until(lambda: len(node.submitted) == number)
    return [request.token_ids[0] for request in node.submitted]


async def test_a_request_waits_at_the_router_until_a_node_has_room(strict: World) -> None:
    await tell(strict, free=2)
    waits = asyncio.create_task(call(strict, [7] * 20, timeline=True))
    await until_waiting(strict, 1)
    assert strict.decode[0].submitted == []
    await tell(strict, free=NUM_BLOCKS)
    answer = (await waits).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert await waiting(strict) == {"short": 0, "long": 0}


async def test_the_timeline_has_the_time_in_the_routers_queue(make_world: WorldMaker) -> None:
    async with make_world() as world:
        answer = (await world.complete(max_tokens=3, timeline=True)).json()
        stages = answer["timeline"]["stages"]
        assert [stage["name"] for stage in stages[:2]] == ["admission", "router_queue"]
        assert stages[1]["node"] == "router"


async def test_a_request_that_ends_makes_room_without_a_word_of_the_node(strict: World) -> None:
    async def hold(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        held.append((session, request))

    held: list[tuple[FakeSession, Request]] = []
    node = strict.decode[0]
    node.behave = hold
    first = asyncio.create_task(call(strict, [7] * 20))
    await until(lambda: len(held) == 1)
    await tell(strict, free=2)
    second = asyncio.create_task(call(strict, [8] * 20))
    await until_waiting(strict, 1)
    for _ in range(2):
        await until(lambda: len(held) > 0)
        session, request = held.pop()
        session.say(request, 0, 0, node.answer_ids[:1], finish=FinishReason.LENGTH)
    assert {(await each).status_code for each in (first, second)} == {200}


async def test_a_full_class_is_refused_with_a_time_to_come_again(strict: World) -> None:
    await tell(strict, free=0)
    calls = [asyncio.create_task(call(strict, [7] * 20)) for _ in range(4)]
    await until_waiting(strict, 4)
    refused = await call(strict, [8] * 20)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "class short" in refused.json()["error"]["message"]
    other_class = asyncio.create_task(call(strict, [8] * 50))
    await until_waiting(strict, 4, 1)
    await tell(strict, free=NUM_BLOCKS)
    assert {(await each).status_code for each in (*calls, other_class)} == {200}


async def test_a_client_that_leaves_the_queue_reaches_no_node(strict: World) -> None:
    await tell(strict, free=0)
    leaves = asyncio.create_task(call(strict, [7] * 20))
    await until_waiting(strict, 1)
    leaves.cancel()
    await until_waiting(strict, 0)
    await tell(strict, free=NUM_BLOCKS)
    assert (await call(strict, [8] * 20)).status_code == 200
    assert await prompts_served(strict, 1) == [8]


async def test_priorities_order_the_queue(strict: World) -> None:
    await tell(strict, free=0)
    calls = []
    for number, priority in enumerate([0, 5, -5, 0]):
        calls.append(asyncio.create_task(call(strict, [10 + number] * 20, priority=priority)))
        await until_waiting(strict, number + 1)
    await tell(strict, free=NUM_BLOCKS)
    assert await prompts_served(strict, 4) == [12, 10, 13, 11]
    await asyncio.gather(*calls)


async def test_keys_take_turns(strict: World) -> None:
    await tell(strict, free=0)
    calls = []
    for number, key in enumerate(["a", "a", "a", None]):
        calls.append(asyncio.create_task(call(strict, [10 + number] * 20, key=key)))
        await until_waiting(strict, number + 1)
    await tell(strict, free=NUM_BLOCKS)
    assert await prompts_served(strict, 4) == [10, 13, 11, 12]
    await asyncio.gather(*calls)


@pytest.mark.parametrize("priority", [-101, 101, 10**30])
async def test_a_priority_out_of_range_is_named(strict: World, priority: int) -> None:
    response = await strict.complete(priority=priority)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
    response = await strict.chat(priority=priority)
    assert response.json()["error"]["param"] == "priority"


async def test_the_client_says_priority_and_key(strict: World) -> None:
    await tell(strict, free=0)
    calls = []
    async with (
        AsyncClient(strict.router.grpc_address, api_key="a") as first,
        AsyncClient(strict.router.grpc_address, api_key="b") as second,
    ):
        for number, (client, priority) in enumerate(
            [(first, 0), (first, 0), (second, 0), (second, -1)]
        ):
            prompt = [10 + number] * 20
            answer = client.generate(prompt, priority=priority, max_tokens=1)
            calls.append(asyncio.ensure_future(answer))
            await until_waiting(strict, number + 1)
        await tell(strict, free=NUM_BLOCKS)
        assert await prompts_served(strict, 4) == [13, 10, 12, 11]
        await asyncio.gather(*calls)
        with pytest.raises(InvalidRequestError, match="priority"):
            await first.generate([1], priority=101)


async def test_a_full_class_is_resource_exhausted_over_grpc(strict: World) -> None:
    await tell(strict, free=0)
    async with AsyncClient(strict.router.grpc_address) as client:
        calls = [asyncio.ensure_future(client.generate([7] * 20, max_tokens=1)) for _ in range(4)]
        await until_waiting(strict, 4)
        with pytest.raises(OverloadedError) as caught:
            await client.generate([7] * 20, max_tokens=1)
        assert caught.value.retry_after_s >= 1.0
        await tell(strict, free=NUM_BLOCKS)
        await asyncio.gather(*calls)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(make_world: WorldMaker) -> AsyncIterator[World]:
    """A router whose queue is impatient, before a node that has no room."""
    limits = LimitsConfig(max_sent_ahead=0, queue_timeout_s=0.1)
    async with make_world(limits=limits) as made:
        await tell(made, free=0)
        yield made


async def test_who_waited_too_long_gets_408_and_cost_nothing(hasty: World) -> None:
    response = await call(hasty, [7] * 20)
    assert response.status_code == 408
    error = response.json()["error"]
    assert error["type"] == "queue_deadline_error"
    assert "queue_timeout_s" in error["message"]
    streamed = await call(hasty, [7] * 20, stream=True)
    assert streamed.status_code == 408
    assert hasty.decode[0].submitted == []
    metrics = (await hasty.http.get("/metrics")).text
    assert 'pdserve:requests_refused_total{reason="queue_deadline"} 2' in metrics


async def test_who_waited_too_long_is_told_so_over_grpc(hasty: World) -> None:
    async with AsyncClient(hasty.router.grpc_address) as client:
        with pytest.raises(QueueDeadlineError, match="queue_timeout_s"):
            await client.generate([7] * 20)
    async with grpc.aio.insecure_channel(hasty.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7])))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in stream]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_requests_wait_while_a_node_has_too_many_prompts_ahead(
    make_world: WorldMaker,
) -> None:
    async with make_world(limits=LimitsConfig(max_prefill_wait_s=1.0)) as world:
        node = world.decode[0]
        node.behave = at_once
        node.queued_tokens = 1_000_000
        await tell(world, free=NUM_BLOCKS, running=2)
        waits = asyncio.create_task(call(world, [7] * 20))
        async with asyncio.timeout(10.0):
            while sum((await waiting(world)).values()) == 0:
                await asyncio.sleep(0.005)
        assert node.submitted == []
        node.queued_tokens = 0
        await tell(world, free=NUM_BLOCKS, running=1)
        assert (await waits).status_code == 200


async def test_a_short_request_timeout_ends_the_waiting_too(make_world: WorldMaker) -> None:
    limits = LimitsConfig(max_sent_ahead=0, request_timeout_s=0.1)
    async with make_world(limits=limits) as world:
        await tell(world, free=0)
        assert (await call(world, [7] * 20)).status_code == 408


async def test_a_queue_is_ended_by_shutdown(make_world: WorldMaker) -> None:
    async with make_world(limits=LimitsConfig(max_sent_ahead=0)) as world:
        await tell(world, free=0)
        waits = asyncio.create_task(call(world, [7] * 20))
        async with asyncio.timeout(10.0):
            while sum((await waiting(world)).values()) == 0:
                await asyncio.sleep(0.005)
        await world.router.close(0.0)
        assert (await waits).status_code == 503


async def test_no_more_than_allowed_is_sent_ahead_and_the_rest_waits(
    make_world: WorldMaker,
) -> None:
    go_on = asyncio.Event()

    async def held(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        await go_on.wait()
        await at_once(node, session, request)

    async with make_world(limits=LimitsConfig(max_sent_ahead=1)) as world:
        node = world.decode[0]
        node.behave = held
        await tell(world, free=0)
        calls = [asyncio.create_task(call(world, [7] * 20)) for _ in range(3)]
        async with asyncio.timeout(10.0):
            while sum((await waiting(world)).values()) < 2:
                await asyncio.sleep(0.005)
        await until(lambda: len(node.submitted) > 0)  # the one that is sent may be on its way
        assert len(node.submitted) == 1
        go_on.set()
        await tell(world, free=NUM_BLOCKS)
        assert {(await each).status_code for each in calls} == {200}
        assert len(node.submitted) == 3
