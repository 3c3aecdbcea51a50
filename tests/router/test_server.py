"""A router as a whole: ports, start and stop."""

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdserve.core.config import RouterConfig
from pdserve.core.errors import ConfigError, ModelFilesError
from pdserve.core.model_spec import read_model_spec
from router.server import _listen, start_router
from router.service import RouterSpec
from tests.router.conftest import ANSWER, WorldMaker, until
from tests.router.fake_nodes import answer


@pytest.fixture
def spec(model_dir: Path) -> RouterSpec:
    return RouterSpec(
        config=RouterConfig(http_port=0, grpc_port=0),
        served_name="tiny",
        model_dir=model_dir,
        model=read_model_spec(model_dir),
        dtype="float32",
        max_model_len=None,
        headroom_tokens=64,
        prefill_configured=False,
    )


@pytest.mark.parametrize("key", ["http_port", "grpc_port"])
async def test_a_taken_port_is_named_and_the_other_one_is_free_again(
    spec: RouterSpec, key: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = replace(spec.config, **{key: port})
        with pytest.raises(ConfigError, match=f"router.{key}: cannot listen on 127.0.0.1:{port}"):
            await start_router(replace(spec, config=config))


async def test_a_router_whose_tokenizer_is_missing_does_not_start(
    spec: RouterSpec, tmp_path: Path
) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        await start_router(replace(spec, model_dir=tmp_path))


async def test_a_router_without_nodes_answers_and_is_not_ready(spec: RouterSpec) -> None:
    router = await start_router(spec)
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}", trust_env=False) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        response = await http.post("/v1/completions", json={"prompt": "Hi"})
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "no_node_error"
    await router.close(0.0)


@pytest.mark.parametrize(("was_ready", "state"), [(False, "not ready"), (True, "degraded")])
async def test_a_router_made_anew_is_degraded_without_prefill_nodes_where_all_was_ready_once(
    make_world: WorldMaker, spec: RouterSpec, was_ready: bool, state: str
) -> None:
    async with make_world() as world:
        router = await start_router(
            replace(
                spec,
                nodes=(world.decode[0].address,),
                prefill_configured=True,
                was_ready=was_ready,
            )
        )
        async with httpx.AsyncClient(
            base_url=f"http://{router.http_address}", trust_env=False
        ) as http:
            async with asyncio.timeout(5):
                while "prefill" not in (reply := await http.get("/ready")).text:
                    await asyncio.sleep(0.01)
            assert reply.status_code == (200 if was_ready else 503)
            assert state in reply.text
        await router.close(0.0)


async def test_closing_lets_requests_end_within_the_grace(make_world: WorldMaker) -> None:
    async with make_world() as world:
        world.decode[0].token_time_s = 0.01
        call = asyncio.create_task(world.complete(max_tokens=100))
        await world.decode[0].arrivals.get()
        closing = asyncio.create_task(world.router.close(10.0))
        await until(lambda: world.router.closing)
        refused = await world.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "the router is shutting down"
        assert refused.json()["error"]["type"] == "shutting_down_error"
        assert (await call).json()["choices"][0]["text"] == ANSWER
        await closing


async def test_closing_ends_what_takes_longer(make_world: WorldMaker) -> None:
    async with make_world() as world:
        node = world.decode[0]
        node.token_time_s = 0.1
        call = asyncio.create_task(world.complete(max_tokens=400, stream=True, ignore_eos=True))
        await node.arrivals.get()
        await asyncio.sleep(0.2)
        await world.router.close(0.1)
        response = await call
        assert response.status_code == 200
        *_, last, end = response.text.split("\n\n")
        assert (json.loads(last.removeprefix("data: "))["error"], end) == (
            {
                "message": "the router is shutting down",
                "type": "shutting_down_error",
                "param": None,
                "code": None,
            },
            "",
        )
        assert not node.sessions or node.aborted


async def test_two_routers_may_stand_before_the_same_nodes(
    make_world: WorldMaker, spec: RouterSpec
) -> None:
    async with make_world() as world:
        world.decode[0].behave = answer
        other = await start_router(replace(spec, nodes=(world.decode[0].address,)))
        async with httpx.AsyncClient(
            base_url=f"http://{other.http_address}", trust_env=False
        ) as http:
            async with asyncio.timeout(5):
                while (await http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.01)
            body = {"prompt": "Hi", "max_tokens": 100}
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for client in (http, world.http) * 4)
            )
        assert [item.json()["choices"][0]["text"] for item in answers] == [ANSWER] * 8
        ids = {request.request_id for request in world.decode[0].submitted}
        assert len(ids) == 8, "no router gives a name that another has given"
        await other.close(0.0)


def test_connections_send_small_events_at_once() -> None:
    with (
        _listen(RouterConfig(http_port=0, grpc_port=0)) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
