"""Requests that run side by side while the cluster is disturbed, and what became of them."""

import asyncio
from dataclasses import dataclass, field

from pdserve.client.async_client import AsyncClient
from pdserve.core.errors import PdserveError

NUM_REQUESTS = 4  # two for each node of a role
PROMPT_LEN = 1500
MAX_TOKENS = 48
TIMEOUT_S = 120.0
_VOCABULARY = 500


@dataclass
class Asked:
    """One request and what came of it."""

    number: int
    token_ids: list[int] = field(default_factory=list)
    error: PdserveError | None = None
    finish_reason: str | None = None


class Burst:
    """Half of the requests greedy, half sampled with a seed."""

    def __init__(self, grpc_address: str) -> None:
        self.requests = [Asked(number) for number in range(NUM_REQUESTS)]
        self._grpc_address = grpc_address
        self._progress = asyncio.Condition()

    async def run(self) -> None:
        """Until all have ended."""
        async with AsyncClient(self._grpc_address) as client:
            await asyncio.gather(*(self._ask(client, asked) for asked in self.requests))

    async def until_tokens(self, count: int) -> None:
        """Until some request has so many tokens, or all have ended."""
        async with asyncio.timeout(TIMEOUT_S), self._progress:
            await self._progress.wait_for(lambda: self._most() >= count or self._all_over())

    def _most(self) -> int:
        return max(len(asked.token_ids) for asked in self.requests)

    def _all_over(self) -> bool:
        return all(asked.finish_reason or asked.error for asked in self.requests)

    async def _ask(self, client: AsyncClient, asked: Asked) -> None:
        number = asked.number
        try:
            async for chunk in client.generate(
                [(7 * number + i * (number + 3)) % _VOCABULARY for i in range(PROMPT_LEN)],
                stream=True,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                temperature=float(number % 2),
                seed=number,
                timeout_s=TIMEOUT_S,
            ):
                asked.token_ids += chunk.token_ids
                asked.finish_reason = chunk.finish_reason or asked.finish_reason
                await self._note()
        except PdserveError as error:
            asked.error = error
        await self._note()

    async def _note(self) -> None:
        async with self._progress:
            self._progress.notify_all()
