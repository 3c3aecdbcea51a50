"""Nodes that come, go, refuse or keep failing while the router serves."""

import asyncio

import pytest

from pdserve.core.request import Request
from tests.router.conftest import ANSWER, WAIT_S, World, WorldMaker, until, until_reason
from tests.router.fake_nodes import FakeDecodeNode, FakeSession, answer

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_without_a_decode_node_the_answer_is_503(make_world: WorldMaker) -> None:
    async with make_world(await_ready=False) as world:
        await until(lambda: bool(world.decode[0].sessions))
        world.decode[0].ready = False
        world.decode[0].tell_state()
        await until_reason(world, "not now")
        assert (await world.complete()).status_code == 503
        assert (await world.http.get("/ready")).status_code == 503


async def test_a_node_that_refuses_is_not_used_and_says_why(make_world: WorldMaker) -> None:
    async with make_world(await_ready=False) as world:
        await world.decode[0].stop()
        world.decode[0].refusal = "model_fingerprint differs"
        await world.decode[0].start()
        await until_reason(world, "model_fingerprint differs")
        response = await world.complete()
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "no_node_error"


async def test_nodes_come_and_go_at_run_time(make_world: WorldMaker) -> None:
    async with make_world(num_decode=2) as world:
        first, second = world.decode
        first.token_time_s = second.token_time_s = 0.01
        call = asyncio.create_task(world.complete(max_tokens=100))
        await until(lambda: bool(first.submitted or second.submitted))
        leaving, staying = (first, second) if first.submitted else (second, first)
        await asyncio.sleep(0.05)
        world.router.set_nodes([staying.address])
        assert (await call).json()["choices"][0]["text"] == ANSWER
        assert [request.attempt for request in staying.submitted] == [1]
        assert [node["name"] for node in await world.nodes()] == [staying.name]
        await until(lambda: not leaving.sessions)


async def test_a_cluster_with_prefill_is_ready_with_a_pair_and_degraded_without(
    make_world: WorldMaker,
) -> None:
    async with make_world(num_prefill=1) as world:
        assert (await world.http.get("/ready")).json()["status"] == "ready"
        await world.prefill[0].stop()
        await until_reason(world, "no prefill node is ready")
        assert (await world.http.get("/ready")).json()["status"] == "degraded"
        response = await world.complete(max_tokens=100, timeline=True)
        assert response.json()["timeline"]["route"] == "local"
        assert "no prefill node" in response.json()["timeline"]["explain"]


async def test_a_cluster_with_prefill_is_not_ready_before_a_prefill_node_is(
    make_world: WorldMaker,
) -> None:
    async with make_world(num_prefill=1, await_ready=False) as world:
        await world.prefill[0].stop()
        await until_reason(world, "no prefill node is ready")
        assert (await world.http.get("/ready")).status_code == 503


async def test_short_prompts_go_to_the_decode_node_and_long_ones_to_prefill(
    make_world: WorldMaker,
) -> None:
    async with make_world(num_prefill=2, local_prefill_below=50) as world:
        await world.complete(prompt=[5] * 49, max_tokens=1)
        await world.complete(prompt=[5] * 50, max_tokens=1)
        short, long = world.decode[0].submitted
        assert short.route.prefill_nodes == ()
        assert set(long.route.prefill_nodes) == {"prefill-0", "prefill-1"}
        assert long.route.local_allowed
        routes = (await world.status())["routes"]
        assert routes == {"disaggregated": 1, "local": 1, "fallback": 0}


async def test_prompts_spread_over_equal_prefill_nodes(make_world: WorldMaker) -> None:
    async def hold(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        await asyncio.sleep(0.2)
        await answer(node, session, request)

    async with make_world(num_prefill=2) as world:
        world.decode[0].behave = hold
        await world.complete(prompt=[[5] * 100] * 6, max_tokens=1)
        firsts = [request.route.prefill_nodes[0] for request in world.decode[0].submitted]
        assert sorted(firsts) == ["prefill-0"] * 3 + ["prefill-1"] * 3


async def test_a_router_hears_when_a_node_is_silent(make_world: WorldMaker) -> None:
    async with make_world(silence_s=0.3) as world:
        await until_reason(world, "nothing heard for 0.3 s")


async def test_a_node_that_keeps_failing_is_left_alone_and_tried_again(
    make_world: WorldMaker,
) -> None:
    async def fail(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.fail(request, "rank_error", "out of order", retryable=True)

    async with make_world(num_decode=2) as world:
        bad = world.decode[0]
        bad.behave = fail
        for _ in range(12):
            answer_json = (await world.complete(max_tokens=100)).json()
            assert answer_json["choices"][0]["text"] == ANSWER
        assert len(bad.submitted) <= 4
        (shown,) = [node for node in await world.nodes() if node["name"] == bad.name]
        assert shown["breaker"] in ("open", "half_open")
        assert (
            'pdserve:node_breaker_open{node="decode-0",stage="decode",seen_by="router"} 1'
            in (await world.http.get("/metrics")).text
        )
        bad.forget()
        await until_ready_again(world, bad.name)
        while not bad.submitted:
            assert (await world.complete(max_tokens=100)).status_code == 200
        (shown,) = [node for node in await world.nodes() if node["name"] == bad.name]
        assert (shown["breaker"], shown["reason"]) == ("closed", None)


async def until_ready_again(world: World, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not any(node["ready"] for node in await world.nodes() if node["name"] == name):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["invalid_request_error", "never_fits_error", "transfer_error"])
async def test_what_is_no_fault_of_the_node_never_bars_it(world: World, kind: str) -> None:
    async def fail(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
        session.fail(request, kind, "prompt: not here", retryable=False)

    world.decode[0].behave = fail
    for _ in range(5):
        await world.complete()
    assert all(node["ready"] and node["breaker"] == "closed" for node in await world.nodes())
