"""JSON-schema requests to a running server: does every answer parse and keep to its schema?

And what does a grammar add to the first token?
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from pdserve.bench.authorization import headers
from pdserve.bench.server import Server
from pdserve.bench.structured.schemas import Schema, make_schema

PROMPT = "Invent an example of an object with these properties, as JSON: {names}."
MAX_TOKENS = 400
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. ``problem``: why it is not what was asked for."""

    text: str
    problem: str | None
    ttft_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Medians of the time to the first token, one request at a time; each kind in turn."""

    plain_s: float
    new_grammar_s: float  # of a schema that the server has not seen
    known_grammar_s: float


async def ask_all(server: Server, model: str, *, num: int, at_once: int, seed: int) -> list[Answer]:
    """``num`` requests, each with a schema of its own; ``at_once`` of them at a time."""
    draw = random.Random(seed)
    schemas = [make_schema(draw) for _ in range(num)]
    turns = asyncio.Semaphore(at_once)
    async with _client(server) as client:

        async def ask(number: int, schema: Schema) -> Answer:
            async with turns:
                body = _body(model, schema) | {"temperature": 0.7, "seed": number}
                return await _ask(client, body, schema)

        return await asyncio.gather(*(ask(i, schema) for i, schema in enumerate(schemas)))


async def first_tokens(server: Server, model: str, *, rounds: int, seed: int) -> FirstTokens:
    """Ask the same with a new grammar, with the same again and without one, in turn."""
    draw = random.Random(seed)
    kinds: tuple[list[float], list[float], list[float]] = ([], [], [])
    async with _client(server) as client:
        for number in range(rounds + 1):
            schema = make_schema(draw)
            body = _body(model, schema) | {"temperature": 0}
            plain = {key: value for key, value in body.items() if key != "response_format"}
            new, known, without = [
                await _ask(client, each | {"cache_salt": f"{seed}-{number}-{i}"}, schema)
                for i, each in enumerate((body, body, plain))
            ]
            if number > 0:  # the first round warms up
                for kept, answer in zip(kinds, (without, new, known), strict=True):
                    kept.append(answer.ttft_s)
    plain_s, new_s, known_s = map(statistics.median, kinds)
    return FirstTokens(plain_s=plain_s, new_grammar_s=new_s, known_grammar_s=known_s)


async def read_answer(response: httpx.Response, schema: Schema | None, *, began_s: float) -> Answer:
    """What a streamed answer says; it is judged where there is a ``schema``."""
    ttft_s, pieces, reason, num_tokens = 0.0, list[str](), None, 0
    if response.status_code != httpx.codes.OK:
        refusal = (await response.aread()).decode(errors="replace")
        return Answer(text="", problem=refusal, ttft_s=0.0, num_tokens=0)
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return Answer(text="", problem=str(event["error"]), ttft_s=0.0, num_tokens=0)
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not any(pieces):
                ttft_s = time.perf_counter() - began_s
            pieces.append(text)
            reason = choice["finish_reason"] or reason
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    whole = "".join(pieces)
    problem = None if schema is None else judge(whole, reason, schema)
    return Answer(text=whole, problem=problem, ttft_s=ttft_s, num_tokens=num_tokens)


def judge(text: str, reason: str | None, schema: Schema) -> str | None:
    """Why the answer is not what was asked for, None where it is."""
    if reason != "stop":
        return f"finish_reason {reason}"
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = Draft202012Validator.FORMAT_CHECKER
    errors: Sequence[Any] = list(
        Draft202012Validator(schema, format_checker=checker).iter_errors(value)
    )
    return str(errors[0].message) if errors else None


def _client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=server.url,
        headers=headers(),
        timeout=TIMEOUT_S,
        trust_env=False,
        verify=server.verify,
    )


def _body(model: str, schema: Schema) -> dict[str, Any]:
    names = ", ".join(schema["properties"])
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT.format(names=names)}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "example", "strict": True, "schema": schema},
        },
    }


async def _ask(client: httpx.AsyncClient, body: Mapping[str, Any], schema: Schema) -> Answer:
    began_s = time.perf_counter()
    asked_for = schema if "response_format" in body else None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        return await read_answer(response, asked_for, began_s=began_s)
