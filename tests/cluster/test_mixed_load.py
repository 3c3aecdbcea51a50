"""200 requests at once, of all kinds: each ends with its right answer or its error, and afterwards
every block of every node is free.
"""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from pdserve.client.async_client import AsyncClient
from tests.cluster.golden import SHORT_CASES, body_of, first_difference
from tests.cluster.served import Served

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]

ALL_END_TIMEOUT_S = 240.0
LATEST_ABORT_S = 6.0
MALFORMED: list[tuple[dict[str, object] | bytes, int, str]] = [
    (b"{not json", 400, ""),
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": [10**9]}, 400, "prompt"),
    ({"prompt": [5] * 9000}, 400, "prompt"),
    ({"max_tokens": 3}, 400, "prompt"),
    ({"prompt": "x", "model": "other"}, 404, "model"),
    ({"prompt": "x", "n": 99}, 400, "n"),
]
LONG_PROMPT = [5 + i % 2000 for i in range(600)]


async def test_two_hundred_requests_of_all_kinds_end_and_free_every_block(cluster: Served) -> None:
    chance = random.Random(0)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(
            base_url=cluster.http_url, timeout=ALL_END_TIMEOUT_S, limits=limits, trust_env=False
        ) as http,
        AsyncClient(cluster.grpc_address) as grpc,
        asyncio.timeout(ALL_END_TIMEOUT_S),
    ):
        requests: list[Coroutine[Any, Any, object]] = [
            *(ask_greedily(http, SHORT_CASES[i % len(SHORT_CASES)]) for i in range(60)),
            *(ask_twice_with_a_seed(http, seed) for seed in range(20)),  # 40 requests
            *(leave_http(http, i, chance.uniform(0, LATEST_ABORT_S)) for i in range(40)),
            *(leave_grpc(grpc, i, chance.uniform(0, LATEST_ABORT_S)) for i in range(10)),
            *(abort_grpc(grpc, chance.randrange(1, 20)) for _ in range(10)),
            *(send_malformed(http, *MALFORMED[i % len(MALFORMED)]) for i in range(40)),
        ]
        chance.shuffle(requests)
        await asyncio.gather(*requests)
    await asyncio.to_thread(cluster.wait_until_idle)


async def ask_greedily(http: httpx.AsyncClient, case: dict[str, Any]) -> None:
    """The answer is the reference's, whatever else is in the batch."""
    reply = await http.post("/v1/completions", json=body_of(case))
    assert reply.status_code == 200, reply.text
    problem = first_difference(case, reply.json()["choices"][0]["token_ids"])
    assert problem is None, f"{case['prompt']!r}: {problem}"


async def ask_twice_with_a_seed(http: httpx.AsyncClient, seed: int) -> None:
    """The same seed gives the same tokens, wherever in whichever batch."""
    prompt = SHORT_CASES[seed % len(SHORT_CASES)]["prompt_token_ids"]
    body = {"prompt": prompt, "max_tokens": 8, "seed": seed, "return_token_ids": True}
    replies = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
    tokens = [reply.json()["choices"][0]["token_ids"] for reply in replies]
    assert tokens[0] == tokens[1]


async def leave_http(http: httpx.AsyncClient, i: int, after_s: float) -> None:
    """Close the connection at any moment, before or within the answer."""
    prompt: object = LONG_PROMPT if i % 2 else "Once upon a time"
    body = {"prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True}
    try:
        async with (
            asyncio.timeout(after_s),
            http.stream("POST", "/v1/completions", json=body) as reply,
        ):
            assert reply.status_code == 200
            async for _ in reply.aiter_lines():
                pass
    except TimeoutError:
        pass


async def leave_grpc(grpc: AsyncClient, i: int, after_s: float) -> None:
    """Drop the stream at any moment."""
    prompt = LONG_PROMPT if i % 2 else [5, 6, 7]
    try:
        async with asyncio.timeout(after_s):
            async for _ in grpc.generate(prompt, stream=True, max_tokens=200, ignore_eos=True):
                pass
    except TimeoutError:
        pass


async def abort_grpc(grpc: AsyncClient, after_tokens: int) -> None:
    """Abort by name: the stream ends by itself, with what there was."""
    num_tokens = 0
    reasons = []
    async for chunk in grpc.generate([5, 6, 7], stream=True, max_tokens=400, ignore_eos=True):
        num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            reasons.append(chunk.finish_reason)
        elif num_tokens >= after_tokens:
            await grpc.abort(chunk.request_id)
    assert reasons == ["abort"]
    assert after_tokens <= num_tokens < 400


async def send_malformed(
    http: httpx.AsyncClient, body: dict[str, object] | bytes, status: int, word: str
) -> None:
    """An error of the right kind that names the field."""
    data = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = await http.post("/v1/completions", **data)
    assert reply.status_code == status, reply.text
    assert word in reply.json()["error"]["message"]
