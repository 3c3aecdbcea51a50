"""Sends a workload to an OpenAI-compatible server and notes when what came back.

Open loop: a request leaves at its time, whether earlier ones were answered or not. Knows HTTP and
the clock; what the times mean is the report's business.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from pdserve.bench.authorization import headers
from pdserve.bench.workload import Arrival, prompt_ids

HTTP_OK = 200
EVENT = "data: "
DONE = "data: [DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server and how it is asked."""

    url: str
    model: str
    vocab_size: int  # prompts are random tokens below it
    seed: int = 0
    verify: ssl.SSLContext | bool = True  # of HTTPS
    timeout_s: float = 600.0
    max_concurrency: int | None = None  # requests on their way at once; None: as many as arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request, times in seconds of one clock. ``error``: how it failed, by name."""

    arrival: Arrival
    sent_s: float
    token_times_s: tuple[float, ...]  # of each event with text or tokens
    end_s: float
    num_tokens: int
    error: str | None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """(latency − TTFT) / (output tokens − 1); None for a single token."""
        if self.num_tokens < 2 or not self.token_times_s:  # noqa: PLR2004
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)


async def run_load(target: Target, workload: Sequence[Arrival]) -> list[Outcome]:
    """All outcomes, in the order of the workload. Never raises for what the server does."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    free = asyncio.Semaphore(target.max_concurrency or len(workload) or 1)
    async with httpx.AsyncClient(
        base_url=target.url,
        headers=headers(),
        limits=limits,
        timeout=target.timeout_s,
        trust_env=False,
        verify=target.verify,
    ) as client:
        start_s = time.perf_counter()
        tasks = []
        for arrival in workload:
            wait_s = start_s + arrival.arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)  # until it arrives: this is the workload itself
            tasks.append(asyncio.create_task(_ask(client, target, arrival, free)))
        return await asyncio.gather(*tasks)


async def _ask(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, free: asyncio.Semaphore
) -> Outcome:
    body = {
        "model": target.model,
        "prompt": prompt_ids(arrival, seed=target.seed, vocab_size=target.vocab_size),
        "max_tokens": arrival.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with free:
        sent_s = time.perf_counter()
        times: list[float] = []
        num_tokens, error = 0, None
        try:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != HTTP_OK:
                    await reply.aread()
                    error = f"http {reply.status_code}"
                async for line in reply.aiter_lines():
                    if not line.startswith(EVENT) or line == DONE:
                        continue
                    event = json.loads(line[len(EVENT) :])
                    if "error" in event:
                        error = f"stream {event['error'].get('type', 'error')}"
                    elif event.get("choices"):
                        times.append(time.perf_counter())
                    if usage := event.get("usage"):
                        num_tokens = usage["completion_tokens"]
        except (httpx.HTTPError, ValueError) as problem:
            error = type(problem).__name__
        if error is None and num_tokens < arrival.output_len:
            error = "ended early"
        return Outcome(
            arrival=arrival,
            sent_s=sent_s,
            token_times_s=tuple(times),
            end_s=time.perf_counter(),
            num_tokens=num_tokens,
            error=error,
        )
