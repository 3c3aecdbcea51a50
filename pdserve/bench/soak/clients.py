"""Clients that never rest: each asks, streams, leaves in the middle or asks nonsense, and checks
what it gets.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx

from pdserve.bench.soak.questions import Question

HTTP_OK, HTTP_BAD_REQUEST = 200, 400
HANG_S = 120.0
EVENT, DONE = "data: ", "data: [DONE]"
KINDS = ("whole", "stream", "leave", "nonsense")
WEIGHTS = (40, 40, 14, 6)
NONSENSE = (
    {"prompt": "x", "max_tokens": -1},
    {"prompt": [10**9]},
    {"prompt": "x", "temperature": "hot"},
    {"max_tokens": 3},
)


class _FailedError(Exception):
    """A request ended with an error; the message is its name."""


@dataclass(slots=True)
class Tally:
    """What came of all requests so far."""

    done: Counter[str] = field(default_factory=Counter)  # by kind
    failures: list[tuple[float, str]] = field(default_factory=list)  # when, and by which name
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Clients:
    """``count`` of them, until ``stop`` is set."""

    def __init__(self, url: str, questions: Sequence[Question], count: int, seed: int) -> None:
        self.tally = Tally()
        self._url = url
        self._questions = questions
        self._count = count
        self._seed = seed

    async def run(self, stop: asyncio.Event) -> None:
        """Every request that was begun is finished before this returns."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=self._url, timeout=HANG_S, limits=limits, trust_env=False
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            for index in range(self._count):
                group.create_task(self._ask_on(http, random.Random(f"{self._seed}/{index}"), stop))

    async def _ask_on(
        self, http: httpx.AsyncClient, chance: random.Random, stop: asyncio.Event
    ) -> None:
        while not stop.is_set():
            (kind,) = chance.choices(KINDS, WEIGHTS)
            question = chance.choice(self._questions)
            start_s = time.monotonic()
            try:
                await self._ask(http, kind, question, chance)
                self.tally.done[kind] += 1
            except (_FailedError, httpx.HTTPError) as error:
                name = str(error) if isinstance(error, _FailedError) else type(error).__name__
                took_s = time.monotonic() - start_s
                if isinstance(error, httpx.ReadTimeout):
                    self.tally.hangs.append(f"{kind}: nothing for {took_s:.0f} s")
                self.tally.failures.append((time.monotonic(), name))
            self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - start_s)

    async def _ask(
        self, http: httpx.AsyncClient, kind: str, question: Question, chance: random.Random
    ) -> None:
        match kind:
            case "whole":
                reply = await http.post("/v1/completions", json=question.body)
                _check_status(reply)
                self._compare(kind, question, reply.json()["choices"][0]["token_ids"])
            case "stream":
                tokens = [t async for more in _stream(http, question) for t in more]
                self._compare(kind, question, tokens)
            case "leave":
                try:
                    async with asyncio.timeout(chance.uniform(0, 3)):
                        tokens = [t async for more in _stream(http, question) for t in more]
                    self._compare(kind, question, tokens)
                except TimeoutError:
                    pass  # it left
            case "nonsense":
                reply = await http.post("/v1/completions", json=chance.choice(NONSENSE))
                if reply.status_code != HTTP_BAD_REQUEST:
                    _check_status(reply)
                    self.tally.wrong.append(f"nonsense was answered: {reply.text[:200]}")

    def _compare(self, kind: str, question: Question, tokens: list[int]) -> None:
        expected = list(question.answer)
        if tokens != expected:
            self.tally.wrong.append(
                f"{kind}: prompt of {len(_prompt(question))} tokens, seed {question.body['seed']}: "
                f"got {tokens}, expected {expected}"
            )


async def _stream(http: httpx.AsyncClient, question: Question) -> AsyncIterator[list[int]]:
    body = question.body | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != HTTP_OK:
            await reply.aread()
            _check_status(reply)
        async for line in reply.aiter_lines():
            if not line.startswith(EVENT) or line == DONE:
                continue
            event = json.loads(line[len(EVENT) :])
            if "error" in event:
                raise _FailedError(f"stream: {event['error'].get('type')}")
            for choice in event["choices"]:
                yield choice.get("token_ids") or []


def _check_status(reply: httpx.Response) -> None:
    if reply.status_code != HTTP_OK:
        try:
            name = reply.json()["error"]["type"]
        except (ValueError, LookupError):
            name = "no error body"
        raise _FailedError(f"{reply.status_code}: {name}")


def _prompt(question: Question) -> Sequence[int]:
    prompt = question.body["prompt"]
    assert isinstance(prompt, list)
    return prompt
