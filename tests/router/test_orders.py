"""Orders reach the one who carries them out, and answers the one who placed them."""

import asyncio

import pytest

from pdserve.core.errors import ConfigError, NoNodeError
from pdserve.core.orders import Drain, OrderAnswer, Scale, refusal
from router.orders import Orders


async def test_each_order_gets_its_own_answer() -> None:
    orders = Orders()
    first = asyncio.create_task(orders.place(Drain(node="decode-0")))
    second = asyncio.create_task(orders.place(Scale(role="decode", count=9)))
    one, two = await orders.next(), await orders.next()
    assert (one.order, two.order) == (Drain(node="decode-0"), Scale(role="decode", count=9))
    orders.answer(refusal(two.number, ConfigError("no room")))
    orders.answer(OrderAnswer(number=one.number, message="draining"))
    assert await first == "draining"
    with pytest.raises(ConfigError, match="no room"):
        await second


async def test_an_order_that_nobody_waits_for_any_more_is_not_carried_out() -> None:
    orders = Orders()
    gone = asyncio.create_task(orders.place(Drain(node="decode-0")))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    waiting = asyncio.create_task(orders.place(Drain(node="decode-1")))
    placed = await orders.next()
    assert placed.order == Drain(node="decode-1")
    orders.answer(OrderAnswer(number=placed.number, message="draining"))
    orders.answer(OrderAnswer(number=placed.number, message="said twice"))
    assert await waiting == "draining"


async def test_silence_is_an_error() -> None:
    with pytest.raises(NoNodeError, match=r"nobody who keeps the nodes answered within 0\.05 s"):
        await Orders(answer_timeout_s=0.05).place(Drain(node="decode-0"))
