"""``pdserve bench handoff``: medians of what timelines say, from a server that says it."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from pdserve.bench.handoff import add_arguments, row_of, run
from pdserve.core.errors import ConfigError

MIB = 1 << 20


def timeline(route: str, *times_ms: float) -> dict[str, Any]:
    names = "prefill", "transfer", "decode_queue", "first_decode"
    stages = [
        {"name": name, "node": "n", "duration_s": time_ms / 1e3}
        for name, time_ms in zip(names, (100.0, *times_ms), strict=False)
    ]
    return {"route": route, "stages": stages, "kv_bytes": 3 * MIB, "transport": "grpc"}


def test_medians_are_of_what_was_handed_over() -> None:
    row = row_of(
        128,
        4,
        [
            timeline("disaggregated", 1.0, 9.0, 5.0),
            timeline("disaggregated", 3.0, 1.0, 6.0),
            timeline("disaggregated", 2.0, 3.0, 7.0),
            timeline("local"),
        ],
    )
    assert (row.tokens, row.load, row.handed_over, row.others) == (128, 4, 3, 1)
    assert (row.transport, row.mib) == ("grpc", 3.0)
    assert (row.transfer_ms, row.decode_queue_ms, row.first_decode_ms) == (2.0, 3.0, 6.0)
    assert (row.handoff_ms, row.handoff_p90_ms) == (5.0, 10.0)


def test_where_nothing_was_handed_over_there_are_no_figures() -> None:
    row = row_of(128, 0, [timeline("local")])
    assert (row.handed_over, row.others, row.handoff_ms, row.transport) == (0, 1, None, None)


class Server:
    """Answers with a timeline; counts what is asked without one."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.num_load = 0
        self.prompts: set[tuple[int, ...]] = set()
        self.app.post("/v1/completions")(self.complete)
        self.app.get("/v1/models")(self.models)

    async def models(self) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m"}]})

    async def complete(self, request: Request) -> JSONResponse:
        body = await request.json()
        if not body.get("timeline"):
            self.num_load += 1
            await asyncio.sleep(0.01)
            return JSONResponse({})
        assert tuple(body["prompt"]) not in self.prompts, "a prefix cache would answer"
        self.prompts.add(tuple(body["prompt"]))
        route = "local" if len(body["prompt"]) == 5 else "disaggregated"
        return JSONResponse({"timeline": timeline(route, 1.0, 2.0, 3.0)})


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, Server]]:
    ours = Server()
    running = uvicorn.Server(uvicorn.Config(ours.app, port=0, log_level="warning"))
    serving = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    yield f"127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}", ours
    running.should_exit = True
    await serving


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options)


async def test_each_length_is_measured_idle_and_under_load(
    server: tuple[str, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    url, ours = server
    options = "--prompt-lens", "7,9", "--rounds", "3", "--load", "2", "--json"
    status = await asyncio.to_thread(run, parsed("--base-url", url, *options))
    assert status == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["tokens"], row["load"]) for row in rows] == [(7, 0), (9, 0), (7, 2), (9, 2)]
    assert all((row["handed_over"], row["handoff_ms"]) == (3, 3.0) for row in rows)
    assert ours.num_load > 0


async def test_a_server_that_hands_nothing_over_is_a_failure(server: tuple[str, Server]) -> None:
    url, _ = server
    options = "--prompt-lens", "5", "--rounds", "1"
    assert await asyncio.to_thread(run, parsed("--base-url", url, *options)) == 1


def test_no_length_and_no_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-lens"):
        run(parsed("--prompt-lens", ""))
    with pytest.raises(ConfigError, match="does not list its models"):
        run(parsed("--base-url", "127.0.0.1:9"))
