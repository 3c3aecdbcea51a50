"""When others are told how a node stands, beside once a second."""

import asyncio

from pdserve.rank.readiness import Readiness


async def test_the_end_of_the_last_work_is_told_at_once() -> None:
    readiness = Readiness()
    changes = readiness.changes(3600.0)
    await anext(changes)
    told = asyncio.ensure_future(anext(changes))
    readiness.note_idle(False)
    await asyncio.sleep(0)
    assert not told.done()
    readiness.note_idle(True)
    await asyncio.wait_for(told, timeout=10)
    await changes.aclose()


async def test_staying_idle_is_no_news() -> None:
    readiness = Readiness()
    changes = readiness.changes(3600.0)
    await anext(changes)
    told = asyncio.ensure_future(anext(changes))
    readiness.note_idle(True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not told.done()
    readiness.lose("the end")
    await asyncio.wait_for(told, timeout=10)
    await changes.aclose()
