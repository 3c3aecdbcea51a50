"""Asks over the public gRPC API with pdserve's own client, and streams the answer."""

import time
from collections.abc import Callable

from pdserve.client.async_client import AsyncClient
from pdserve.cluster.demo.answer import Answer
from pdserve.cluster.demo.http_client import MAX_TOKENS, TIMEOUT_S
from pdserve.core.errors import InternalError


async def ask(address: str, content: str, on_text: Callable[[str], None]) -> Answer:
    """Ask one chat question greedily; ``on_text`` gets the pieces as they come."""
    pieces: list[str] = []
    first_token_s: float | None = None
    last = None
    began_s = time.monotonic()
    async with AsyncClient(address) as client:
        async for chunk in client.generate(
            [{"role": "user", "content": content}],
            stream=True,
            timeline=True,
            timeout_s=TIMEOUT_S,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
        ):
            last = chunk
            if chunk.text:
                first_token_s = first_token_s or time.monotonic() - began_s
                pieces.append(chunk.text)
                on_text(chunk.text)
        total_s = time.monotonic() - began_s
    if first_token_s is None or last is None or last.usage is None or last.timeline is None:
        raise InternalError(f"the stream ended without an answer: {last}")
    return Answer(
        text="".join(pieces),
        prompt_tokens=last.usage.prompt_tokens,
        completion_tokens=last.usage.completion_tokens,
        first_token_s=first_token_s,
        total_s=total_s,
        timeline=last.timeline,
    )
