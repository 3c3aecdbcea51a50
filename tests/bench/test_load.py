"""The load generator against a small server of its own: what came when, and how it failed."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pdserve.bench.load import Target, run_load
from pdserve.bench.workload import Arrival

REFUSED_LEN, BROKEN_LEN, SHORT_LEN = 429, 500, 7  # prompt lengths that this server knows


def make_app() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        length = len(body["prompt"])
        if length == REFUSED_LEN:
            return JSONResponse({"error": {"message": "full"}}, status_code=429)
        return StreamingResponse(events(length, body["max_tokens"]))

    return app


async def events(prompt_len: int, max_tokens: int) -> AsyncIterator[str]:
    num_tokens = max_tokens - 1 if prompt_len == SHORT_LEN else max_tokens
    for _ in range(num_tokens):
        yield event({"choices": [{"text": "x"}]})
        await asyncio.sleep(0.01)
    if prompt_len == BROKEN_LEN:
        yield event({"error": {"type": "node_lost", "message": "gone"}})
    yield event({"choices": [], "usage": {"completion_tokens": num_tokens}})
    yield "data: [DONE]\n\n"


def event(item: dict[str, object]) -> str:
    return f"data: {json.dumps(item)}\n\n"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(make_app(), port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


def arrival(index: int, prompt_len: int, arrival_s: float = 0.0) -> Arrival:
    return Arrival(index=index, arrival_s=arrival_s, prompt_len=prompt_len, output_len=3)


async def test_each_request_has_its_outcome_and_failures_have_names(url: str) -> None:
    lengths = [4, REFUSED_LEN, BROKEN_LEN, SHORT_LEN]
    target = Target(url=url, model="m", vocab_size=100)
    outcomes = await run_load(target, [arrival(i, n) for i, n in enumerate(lengths)])
    assert [outcome.error for outcome in outcomes] == [
        None,
        "http 429",
        "stream node_lost",
        "ended early",
    ]
    good = outcomes[0]
    assert (good.num_tokens, len(good.token_times_s)) == (3, 3)
    assert good.ttft_s is not None
    assert 0 < good.ttft_s < good.end_s - good.sent_s


async def test_requests_leave_at_their_times(url: str) -> None:
    target = Target(url=url, model="m", vocab_size=100)
    workload = [arrival(0, 4), arrival(1, 4, arrival_s=0.2)]
    first, second = await run_load(target, workload)
    assert second.sent_s - first.sent_s == pytest.approx(0.2, abs=0.15)


async def test_no_more_are_on_their_way_than_allowed(url: str) -> None:
    target = Target(url=url, model="m", vocab_size=100, max_concurrency=1)
    outcomes = await run_load(target, [arrival(i, 4) for i in range(4)])
    ordered = sorted(outcomes, key=lambda outcome: outcome.sent_s)
    assert all(a.end_s <= b.sent_s for a, b in itertools.pairwise(ordered))


async def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    target = Target(url="http://127.0.0.1:9", model="m", vocab_size=100)
    (outcome,) = await run_load(target, [arrival(0, 4)])
    assert outcome.error == "ConnectError"
