"""Asks over the public HTTP API, as any OpenAI client would, and streams the answer."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from pdserve.cluster.demo.answer import Answer
from pdserve.core.errors import InternalError
from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Stage, Timeline

TIMEOUT_S = 120.0
MAX_TOKENS = 40


async def ask(url: str, model: str, content: str, on_text: Callable[[str], None]) -> Answer:
    """Ask one chat question greedily; ``on_text`` gets the pieces as they come."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timeline": True,
    }
    pieces: list[str] = []
    first_token_s: float | None = None
    last: dict[str, Any] = {}
    began_s = time.monotonic()
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        if response.is_error:
            raise InternalError(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            last = json.loads(line.removeprefix("data: "))
            for choice in last.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    first_token_s = first_token_s or time.monotonic() - began_s
                    pieces.append(piece)
                    on_text(piece)
    total_s = time.monotonic() - began_s
    if first_token_s is None or "usage" not in last or "timeline" not in last:
        raise InternalError(f"the stream ended without an answer: {last}")
    return Answer(
        text="".join(pieces),
        prompt_tokens=last["usage"]["prompt_tokens"],
        completion_tokens=last["usage"]["completion_tokens"],
        first_token_s=first_token_s,
        total_s=total_s,
        timeline=_timeline(last["timeline"]),
    )


def _timeline(data: dict[str, Any]) -> Timeline:
    return Timeline(
        route=RouteTaken(data["route"]),
        stages=tuple(Stage(**stage) for stage in data["stages"]),
        kv_bytes=data["kv_bytes"],
        transport=data["transport"],
        num_preemptions=data["num_preemptions"],
        cached_tokens=data["cached_tokens"],
    )
