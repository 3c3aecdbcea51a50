"""What comes for readers: in order, complete, and the more at a time the later their turn."""

import asyncio

import pytest

from pdserve.core.request import TokenOutput
from router.inbox import READERS_A_TURN, Inbox, RequestOver, Turns

OVER = RequestOver(
    error=None, timeline=None, planned=None, explain="", num_attempts=1, cached_tokens=0
)


def output(index: int) -> TokenOutput:
    return TokenOutput(request_id="r", attempt=0, choice=0, index=index, token_ids=(index,))


class Reader:
    """Reads an inbox until ``num_news`` have come; ``takes`` are the sizes of what it found."""

    def __init__(self, inbox: Inbox, num_news: int) -> None:
        self.takes: list[int] = []
        self.indices: list[int] = []
        self.task = asyncio.create_task(self._run(inbox, num_news))

    async def _run(self, inbox: Inbox, num_news: int) -> None:
        while len(self.indices) < num_news:
            news = await inbox.take()
            self.takes.append(len(news))
            self.indices += [item.index for _, item in news if isinstance(item, TokenOutput)]


async def one_turn() -> None:
    """The event loop goes round once."""
    await asyncio.sleep(0)


async def test_a_reader_that_comes_late_finds_everything_at_once() -> None:
    inbox = Inbox(Turns())
    for index in range(3):
        inbox.put(0, output(index))
    assert [item for _, item in await inbox.take()] == [output(0), output(1), output(2)]


async def test_a_waiting_reader_is_woken() -> None:
    inbox = Inbox(Turns())
    reader = Reader(inbox, 1)
    await one_turn()
    inbox.put(0, output(0))
    await reader.task
    assert reader.takes == [1]


async def test_readers_are_woken_a_few_at_a_time_in_their_order() -> None:
    turns = Turns()
    inboxes = [Inbox(turns) for _ in range(3 * READERS_A_TURN)]
    readers = [Reader(inbox, 1) for inbox in inboxes]
    await one_turn()
    for inbox in inboxes:
        inbox.put(0, output(0))
    served = 0
    while served < len(readers):
        await one_turn()
        now_served = sum(bool(reader.takes) for reader in readers)
        assert now_served - served <= READERS_A_TURN
        assert all(reader.takes for reader in readers[:now_served])
        served = now_served
    await asyncio.gather(*(reader.task for reader in readers))


@pytest.mark.parametrize(("num_readers", "merges"), [(READERS_A_TURN, False), (256, True)])
async def test_tokens_of_one_request_become_one_event_when_the_router_falls_behind(
    num_readers: int, merges: bool
) -> None:
    """A node's step comes with each turn of the loop, and a turn is too short for 256 readers."""
    num_steps = 64
    turns = Turns()
    inboxes = [Inbox(turns) for _ in range(num_readers)]
    readers = [Reader(inbox, num_steps) for inbox in inboxes]
    await one_turn()
    for step in range(num_steps):
        for inbox in inboxes:
            inbox.put(0, output(step))
        await one_turn()
    await asyncio.gather(*(reader.task for reader in readers))
    assert all(reader.indices == list(range(num_steps)) for reader in readers)
    steps_a_round = num_readers // READERS_A_TURN
    most = max(len(reader.takes) for reader in readers)
    assert most <= (2 * num_steps / steps_a_round if merges else num_steps)


async def test_a_reader_that_was_ended_holds_up_nobody() -> None:
    turns = Turns()
    first, second = Inbox(turns), Inbox(turns)
    readers = [Reader(first, 1), Reader(second, 1)]
    await one_turn()
    first.put(0, output(0))
    second.put(0, output(0))
    readers[0].task.cancel()
    await readers[1].task
    assert readers[1].takes == [1]
    first.put(0, output(1))
    assert [item.index for _, item in await first.take() if isinstance(item, TokenOutput)] == [0, 1]


async def test_a_reader_of_many_waits_for_so_many_or_for_an_end() -> None:
    inbox = Inbox(Turns())
    reading = asyncio.create_task(inbox.take(at_least=3))
    for index in range(2):
        inbox.put(0, output(index))
    await one_turn()
    assert not reading.done()
    inbox.put(0, output(2))
    assert [item for _, item in await reading] == [output(0), output(1), output(2)]

    reading = asyncio.create_task(inbox.take(at_least=3))
    await one_turn()
    inbox.put(1, OVER)
    assert await reading == [(1, OVER)]

    inbox.put(0, OVER)
    assert await inbox.take(at_least=3) == [(0, OVER)]
