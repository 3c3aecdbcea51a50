"""The same Ranks in one process: steps, events, errors, end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

import pytest

from kv_transfer.commands import CancelReceive, EndpointFailed, KvCommand, ReceiveDrained
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import HandoffId
from pdserve.engine.batch import Batch, Chunk, Slot
from pdserve.rank.inline import InlineRanks, start_inline_ranks
from pdserve.rank.parts import RankParts
from tests.fakes import TINY_LAYOUT, FakeEndpoint, FakeRunner, fake_output


class Gate:
    """Holds a launch until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def hold(self, batch: Batch) -> None:
        self._open.wait(5)

    def open(self) -> None:
        self._open.set()


def batch(step: int) -> Batch:
    chunk = Chunk(
        slot=Slot(1), start=step, tokens=(1, 2), new_blocks=(BlockId(step),), num_samples=1
    )
    return Batch(step=step, chunks=(chunk,))


@asynccontextmanager
async def running(
    on_launch: Callable[[Batch], None] = lambda batch: None,
    endpoint: FakeEndpoint | None = None,
    step_timeout_s: float = 10,
) -> AsyncIterator[InlineRanks]:
    endpoint = endpoint or FakeEndpoint()

    @contextmanager
    def open_parts() -> Iterator[RankParts]:
        yield RankParts(FakeRunner(on_launch=on_launch), endpoint)
        endpoint.close()

    ranks = await start_inline_ranks(open_parts, step_timeout_s=step_timeout_s)
    try:
        yield ranks
    finally:
        await ranks.close()
        assert endpoint.closed.is_set()


async def test_outputs_come_in_the_order_of_their_steps_at_depth_two():
    async with running() as ranks:
        assert (ranks.num_blocks, ranks.layout, ranks.addresses) == (
            64,
            TINY_LAYOUT,
            ("127.0.0.1:1",),
        )
        in_flight = [ranks.submit(batch(0))]
        for step in range(1, 50):
            in_flight.append(ranks.submit(batch(step)))
            assert await in_flight.pop(0).output() == fake_output(batch(step - 1))


async def test_a_kv_command_is_answered_while_a_step_runs():
    gate = Gate()
    handoff = HandoffId("request", 0, 0)
    async with running(gate.hold) as ranks:
        step = ranks.submit(batch(0))
        ranks.kv(CancelReceive(handoff=handoff))
        assert await asyncio.wait_for(ranks.next_event(), 5) == (
            0,
            ReceiveDrained(handoff=handoff),
        )
        gate.open()
        assert await step.output() == fake_output(batch(0))


async def test_a_runners_error_fails_everything_that_waits():
    def fail(batch: Batch) -> None:
        raise ValueError("no such step")

    async with running(fail) as ranks:
        steps = [ranks.submit(batch(step)) for step in range(2)]
        for step in steps:
            with pytest.raises(RankError, match="no such step") as raised:
                await step.output()
            assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(RankError, match="no such step"):
            await ranks.next_event()
        assert "no such step" in str(await ranks.failed)


async def test_an_endpoints_error_fails_the_ranks():
    class BadEndpoint(FakeEndpoint):
        def handle(self, command: KvCommand) -> None:
            raise RankError("an endpoint's own fault")

    async with running(endpoint=BadEndpoint()) as ranks:
        ranks.kv(CancelReceive(handoff=HandoffId("request", 0, 0)))
        with pytest.raises(RankError, match="own fault"):
            await asyncio.wait_for(ranks.next_event(), 5)


async def test_an_endpoint_that_has_ended_fails_the_ranks():
    endpoint = FakeEndpoint()
    async with running(endpoint=endpoint) as ranks:
        endpoint.events.put(EndpointFailed(reason="its thread is over"))
        with pytest.raises(RankError, match="its thread is over"):
            await asyncio.wait_for(ranks.next_event(), 5)


async def test_a_step_that_takes_too_long_fails_the_ranks():
    gate = Gate()
    async with running(gate.hold, step_timeout_s=0.05) as ranks:
        with pytest.raises(RankError, match=r"step 7: no output within 0\.05 s"):
            await ranks.submit(batch(7)).output()
        gate.open()


async def test_an_error_at_the_start_is_raised_there():
    def open_parts() -> AbstractContextManager[RankParts]:
        raise RankError("no such model")

    with pytest.raises(RankError, match="no such model"):
        await start_inline_ranks(open_parts, step_timeout_s=1)


async def test_what_waits_at_the_close_gets_an_error():
    async with running() as ranks:
        waiting = asyncio.ensure_future(ranks.next_event())
        await asyncio.sleep(0)
    with pytest.raises(RankError, match="closed"):
        await waiting
