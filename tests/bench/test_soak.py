"""What a soak calls wrong, left over or grown; and its clients against a server that errs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pdserve.bench.own_cluster import Footprint, Victim
from pdserve.bench.soak.clients import Clients
from pdserve.bench.soak.command import broken_promises, growth
from pdserve.bench.soak.kills import Sightings
from pdserve.bench.soak.questions import PROMPT_LENS, Question, answered, drafts

GOOD = {
    "wrong": [],
    "hangs": [],
    "failures_with_nodes_left": {},
    "leaked_blocks": {},
    "orphans": 0,
    "exit_status": 0,
    "rss_growth": 1.02,
    "fd_growth": None,
}


def test_a_soak_in_which_nothing_broke_says_so() -> None:
    assert broken_promises(GOOD) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wrong", ["whole: …"]),
        ("hangs", ["stream: …"]),
        ("failures_with_nodes_left", {"503": 1}),
        ("leaked_blocks", {"decode-0": 3}),
        ("orphans", 1),
        ("exit_status", None),
        ("exit_status", 1),
        ("rss_growth", 1.3),
        ("fd_growth", 1.3),
    ],
)
def test_each_broken_promise_is_named(name: str, value: object) -> None:
    assert broken_promises(GOOD | {name: value}) == [name]


def test_growth_compares_the_last_quarter_with_the_second() -> None:
    looks = [Footprint(rss_bytes=b, num_fds=10, num_processes=5) for b in (1, 100, 150, 200)]
    assert growth(looks)["rss_growth"] == 2.0
    assert growth(looks)["fd_growth"] == 1.0
    assert growth(looks[:3])["rss_growth"] is None


def test_failures_are_excused_only_while_no_decode_node_was_ready() -> None:
    seen = Sightings(ready_decodes=[(1.0, 2), (2.0, 0), (3.0, 1)], kills=[(1.5, VICTIM)])
    assert seen.had_no_decode_node(0.0, 2.0)
    assert not seen.had_no_decode_node(2.5, 4.0)


VICTIM = Victim(node="decode-0", part="front", pid=1)


def test_drafts_are_of_all_lengths_greedy_and_seeded() -> None:
    bodies = drafts(24, "m", seed=1)
    assert {len(body["prompt"]) for body in bodies if isinstance(body["prompt"], list)} == set(
        PROMPT_LENS
    )
    assert {body["temperature"] for body in bodies} == {0, 0.7}
    assert bodies == drafts(24, "m", seed=1)


def answer(tokens: list[int], margin: float) -> dict[str, Any]:
    top = [{"a": -0.1, "b": -0.1 - margin}] * len(tokens)
    choice = {"token_ids": tokens, "logprobs": {"top_logprobs": top}}
    return {"choices": [choice]}


@pytest.mark.parametrize(("margin", "kept"), [(0.5, True), (0.001, False)])
async def test_questions_with_a_near_tie_are_left_out(margin: float, kept: bool) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=answer([4, 5], margin))

    async with httpx.AsyncClient(
        base_url="http://server", transport=httpx.MockTransport(reply)
    ) as client:
        question = await answered(client, {"prompt": [1], "temperature": 0, "max_tokens": 2})
    assert (question is not None) == kept
    assert question is None or question.answer == (4, 5)


@pytest.fixture
async def erring_server() -> AsyncIterator[str]:
    """Answers prompts of one token with a wrong one, and longer ones with an error."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        if not isinstance(body.get("prompt"), list) or max(body["prompt"]) > 9:
            return JSONResponse({"error": {"type": "invalid_request_error"}}, status_code=400)
        if len(body["prompt"]) == 1:
            return JSONResponse({"choices": [{"token_ids": [9]}]})
        return JSONResponse({"error": {"type": "no_node"}}, status_code=503)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


async def asked(url: str, prompt: list[int]) -> Clients:
    body: dict[str, object] = {"prompt": prompt, "seed": 0}
    clients = Clients(url, [Question(body=body, answer=(1,))], count=2, seed=0)
    stop = asyncio.Event()
    running = asyncio.create_task(clients.run(stop))
    while not (clients.tally.wrong or clients.tally.failures):
        await asyncio.sleep(0.01)
    stop.set()
    await running
    return clients


async def test_an_answer_that_is_not_the_known_one_is_wrong(erring_server: str) -> None:
    tally = (await asked(erring_server, [1])).tally
    assert all("expected [1]" in wrong for wrong in tally.wrong)


async def test_an_error_is_a_failure_by_name(erring_server: str) -> None:
    tally = (await asked(erring_server, [1, 2])).tally
    assert {name for _, name in tally.failures} <= {"503: no_node"}
    assert not tally.wrong
