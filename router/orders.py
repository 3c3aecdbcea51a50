"""Orders of operators on their way to whoever keeps the cluster's nodes running.

One side places an order and waits for its answer, the other fetches orders one by one. Knows
nothing of what they mean.
"""

import asyncio
import itertools

from pdserve.core.errors import NoNodeError
from pdserve.core.orders import Order, OrderAnswer, PlacedOrder

ANSWER_TIMEOUT_S = 10.0


class Orders:
    """Lives in one event loop."""

    def __init__(self, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._answer_timeout_s = answer_timeout_s
        self._placed: asyncio.Queue[PlacedOrder] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[OrderAnswer]] = {}
        self._numbers = itertools.count(1)

    async def place(self, order: Order) -> str:
        """What was begun. Raises what it was refused for, or NoNodeError where nobody answers."""
        number = next(self._numbers)
        answer: asyncio.Future[OrderAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._placed.put_nowait(PlacedOrder(number=number, order=order))
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                return (await answer).text()
        except TimeoutError as error:
            raise NoNodeError(
                f"nobody who keeps the nodes answered within {self._answer_timeout_s:g} s"
            ) from error
        finally:
            del self._answers[number]

    async def next(self) -> PlacedOrder:
        """The next order that somebody still waits for."""
        while (placed := await self._placed.get()).number not in self._answers:
            pass
        return placed

    def answer(self, answer: OrderAnswer) -> None:
        """To be called once for each order; an answer that comes too late is dropped."""
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
