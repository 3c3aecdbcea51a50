"""Requests whose answers are known, because the undisturbed cluster gave them.

An answer is kept only where no other token was near at any position: in float32 it is then the same
wherever and with whatever it is computed, so whatever differs later is wrong.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

LEAST_MARGIN = 0.01  # of a greedy choice, in log-probability
PROMPT_LENS = (6, 40, 130, 300, 700, 1500)
MAX_TOKENS = (4, 12, 32)
SEEDED_MAX_TOKENS = 8
VOCAB_SIZE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request and its one right answer."""

    body: dict[str, object]
    answer: tuple[int, ...]


def drafts(count: int, model: str, seed: int) -> list[dict[str, object]]:
    """Bodies of requests of all lengths; every fourth one sampled with a seed."""
    draw = random.Random(seed)
    bodies = []
    for index in range(count):
        length = PROMPT_LENS[index % len(PROMPT_LENS)]
        sampled = index % 4 == 3  # noqa: PLR2004
        bodies.append(
            {
                "model": model,
                "prompt": draw.choices(range(VOCAB_SIZE), k=length),
                "max_tokens": SEEDED_MAX_TOKENS if sampled else draw.choice(MAX_TOKENS),
                "temperature": 0.7 if sampled else 0,
                "seed": index,
                "return_token_ids": True,
            }
        )
    return bodies


async def answered(client: httpx.AsyncClient, body: dict[str, object]) -> Question | None:
    """The body with its answer; None where a choice was too near to another."""
    reply = await client.post("/v1/completions", json=body | {"logprobs": 2})
    reply.raise_for_status()
    choice = reply.json()["choices"][0]
    if (
        body["temperature"] == 0
        and _least_margin(choice["logprobs"]["top_logprobs"]) < LEAST_MARGIN
    ):
        return None
    return Question(body=body, answer=tuple(choice["token_ids"]))


def _least_margin(positions: Sequence[dict[str, float]]) -> float:
    """Between the best and the second best token; tokens of equal text count as one."""
    margins = [
        best - second
        for best, second, *_ in (
            sorted(position.values(), reverse=True) for position in positions if len(position) > 1
        )
    ]
    return min(margins, default=0.0)
