"""Front and ranks in processes of their own, with fake runners: order, failure, death, end."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer.commands import CancelSend, ConnectPeer, Peer, PeerConnected, SendDrained
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import HandoffId, PromptLogprob
from pdserve.core.starvation import ProcessId, Starvation
from pdserve.engine.batch import Batch, Carried, Chunk, Scored, Slot, StepOutput
from pdserve.rank.intake import MAX_PROMPT_LOGPROBS
from pdserve.rank.ring import RingReader, RingWriter, create_ring
from pdserve.rank.ring_ranks import (
    KV_BYTES,
    OUT_BYTES,
    STEPS_BYTES,
    RingRanks,
    outputs_bytes,
    start_ranks,
)
from pdserve.rank.wire import decode, encode
from tests.fakes import TINY_LAYOUT, fake_output
from tests.rank.rank_child import BAD_STEP

StartChildren = Callable[..., list[subprocess.Popen[bytes]]]

LIFELINES = {"lifeline.0", "lifeline.1"}


@pytest.fixture
def start_children(tmp_path: Path) -> Iterator[StartChildren]:
    """Start a ``rank_child`` for each given misbehaviour; none outlives the test."""
    children: list[subprocess.Popen[bytes]] = []

    def start(*kinds: str) -> list[subprocess.Popen[bytes]]:
        for rank, kind in enumerate(kinds):
            command = [
                sys.executable,
                "-m",
                "tests.rank.rank_child",
                str(tmp_path),
                str(rank),
                kind,
            ]
            children.append(subprocess.Popen(command))
        return children

    yield start
    for child in children:
        child.kill()
        child.wait()


@asynccontextmanager
async def running(
    tmp_path: Path,
    tp_size: int,
    *,
    step_timeout_s: float = 20,
    silence_s: float = 20,
    starvation: Starvation | None = None,
) -> AsyncIterator[RingRanks]:
    ranks = await start_ranks(
        run_dir=tmp_path,
        tp_size=tp_size,
        start_timeout_s=20,
        step_timeout_s=step_timeout_s,
        silence_s=silence_s,
        starvation=starvation,
    )
    try:
        yield ranks
    finally:
        await ranks.close()


def left_by_the_front(tmp_path: Path) -> list[str]:
    """The files that a failed start left. A rank that comes late waits at a lifeline of its own."""
    return [path.name for path in tmp_path.iterdir() if path.name not in LIFELINES]


def batch(step: int) -> Batch:
    prompt = Chunk(
        slot=Slot(1), start=step, tokens=(1, 2, 3), new_blocks=(BlockId(step),), num_samples=2
    )
    decode = Chunk(slot=Slot(2), start=step, tokens=Carried(), new_blocks=(), num_samples=1)
    return Batch(step=step, chunks=(prompt, decode))


async def within(seconds: float, error: str, ranks: RingRanks) -> None:
    """The ranks fail in this way for everybody who waits or comes later."""
    start_s = time.monotonic()
    lost = await asyncio.wait_for(asyncio.shield(ranks.failed), seconds + 1)
    assert time.monotonic() - start_s < seconds
    assert error in str(lost)
    with pytest.raises(RankError) as raised:
        await ranks.next_event()
    assert raised.value is lost
    with pytest.raises(RankError) as raised:
        await ranks.submit(batch(99)).output()
    assert raised.value is lost
    ranks.kv(connect_peer("late"))


def connect_peer(peer_id: str) -> ConnectPeer:
    peer = Peer(peer_id=peer_id, layout=TINY_LAYOUT, transport="grpc", addresses=("h:1",))
    return ConnectPeer(peer=peer)


async def test_steps_and_kv_commands_reach_all_ranks_and_come_back(tmp_path, start_children):
    children = start_children("good", "good")
    async with running(tmp_path, 2) as ranks:
        assert ranks.num_blocks == 63
        assert ranks.layout == TINY_LAYOUT
        assert ranks.addresses == ("127.0.0.1:0", "127.0.0.1:1")
        for step in range(50):
            assert await ranks.submit(batch(step)).output() == fake_output(batch(step))
        ranks.kv(connect_peer("prefill-0#1"))
        events = [await ranks.next_event() for _ in range(2)]
        assert {rank for rank, _ in events} == {0, 1}
        assert {event for _, event in events} == {PeerConnected(peer_id="prefill-0#1")}
    assert [child.wait(timeout=5) for child in children] == [0, 0]


async def test_at_depth_two_outputs_come_in_the_order_of_their_steps(tmp_path, start_children):
    start_children("good")
    async with running(tmp_path, 1) as ranks:
        in_flight = [ranks.submit(batch(0))]
        for step in range(1, 200):
            in_flight.append(ranks.submit(batch(step)))
            oldest = in_flight.pop(0)
            assert oldest.batch.step == step - 1
            assert await oldest.output() == fake_output(batch(step - 1))
        assert await in_flight[0].output() == fake_output(batch(199))


async def test_a_thousand_steps_at_once_fit_through_the_ring(tmp_path, start_children):
    start_children("good")
    async with running(tmp_path, 1) as ranks:
        steps = [ranks.submit(batch(step)) for step in range(3000)]
        outputs = [await step.output() for step in steps]
        assert [output.step for output in outputs] == list(range(3000))


async def test_a_kv_command_is_handled_while_a_step_runs(tmp_path, start_children):
    children = start_children("hang")
    async with running(tmp_path, 1) as ranks:
        ranks.submit(batch(BAD_STEP))
        handoff = HandoffId("request", 0, 0)
        ranks.kv(CancelSend(handoff=handoff))
        event = await asyncio.wait_for(ranks.next_event(), 5)
        assert event == (0, SendDrained(handoff=handoff))
        children[0].kill()


async def test_the_files_are_gone_once_all_ranks_are_ready(tmp_path, start_children):
    start_children("good", "good")
    async with running(tmp_path, 2):
        assert left_by_the_front(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


async def test_a_cancelled_wait_for_an_output_loses_no_later_one(tmp_path, start_children):
    start_children("good")
    async with running(tmp_path, 1) as ranks:
        first = ranks.submit(batch(0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.output(), 0)
        assert await ranks.submit(batch(1)).output() == fake_output(batch(1))


async def test_batches_and_outputs_larger_than_their_rings_come_through_in_order(
    tmp_path, start_children
):
    start_children("good", "good")
    num_samples = OUT_BYTES // 6  # 8 bytes each
    chunk = Chunk(
        slot=Slot(1),
        start=0,
        tokens=(0,) * (STEPS_BYTES // 7),
        new_blocks=(),
        num_samples=num_samples,
    )
    batches = [batch(0), Batch(step=1, chunks=(chunk,)), batch(2), batch(3)]
    assert len(encode(batches[1])) > STEPS_BYTES
    assert len(encode(fake_output(batches[1]))) > OUT_BYTES
    async with running(tmp_path, 2) as ranks:
        steps = [ranks.submit(each) for each in batches]
        assert [await step.output() for step in steps] == list(map(fake_output, batches))


async def test_kv_commands_and_events_larger_than_their_rings_come_through(
    tmp_path, start_children
):
    start_children("good", "good")
    async with running(tmp_path, 2) as ranks:
        for peer_id in ("small", "large" * KV_BYTES, "last"):
            ranks.kv(connect_peer(peer_id))
            events = [await ranks.next_event() for _ in range(2)]
            assert {event for _, event in events} == {PeerConnected(peer_id=peer_id)}


async def test_a_rank_killed_while_it_is_sent_a_long_batch_is_noticed(tmp_path, start_children):
    children = start_children("good")
    chunk = Chunk(slot=Slot(1), start=0, tokens=(0,) * STEPS_BYTES, new_blocks=(), num_samples=1)
    async with running(tmp_path, 1) as ranks:
        children[0].send_signal(signal.SIGSTOP)
        ranks.submit(Batch(step=0, chunks=(chunk,)))
        children[0].kill()
        await within(
            1, " 0 ", ranks
        )  # "rank 0 (pid …): ended", or that its ring's reader 0 is gone


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_killed_while_idle_is_noticed_within_a_second(
    tmp_path, start_children, victim
):
    children = start_children("good", "good")
    async with running(tmp_path, 2) as ranks:
        children[victim].kill()
        await within(1, f"rank {victim} (pid", ranks)
    other = children[1 - victim]
    assert other.wait(timeout=5) == 0, "the other rank ends with its front's interest"


async def test_a_rank_killed_in_a_step_fails_the_steps_that_wait(tmp_path, start_children):
    start_children("die")
    async with running(tmp_path, 1) as ranks:
        for step in range(BAD_STEP):
            await ranks.submit(batch(step)).output()
        lost = [ranks.submit(batch(BAD_STEP + i)) for i in range(2)]
        for waiting in lost:
            with pytest.raises(RankError, match=r"rank (0 .*)?ended"):
                await asyncio.wait_for(waiting.output(), 1)
        await within(1, "", ranks)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_runners_error_is_told_with_its_text(tmp_path, start_children, rank):
    children = start_children(*("raise" if each == rank else "good" for each in range(2)))
    async with running(tmp_path, 2) as ranks:
        ranks.submit(batch(BAD_STEP))
        await within(1, f"rank {rank} failed: internal_error: ValueError('no such step')", ranks)
    assert [child.wait(timeout=5) for child in children] == [int(each == rank) for each in range(2)]


async def test_an_endpoints_error_is_told_with_its_text(tmp_path, start_children):
    children = start_children("good")
    async with running(tmp_path, 1) as ranks:
        ranks.kv(CancelSend(handoff=HandoffId("bad", 0, 0)))
        await within(1, "rank 0 failed: rank_error: an endpoint's own fault", ranks)
    children[0].wait(timeout=5)


async def test_an_endpoint_that_has_ended_ends_its_rank(tmp_path, start_children):
    """Else the rank would pulse, and its front wait for ever for blocks that are being drained."""
    children = start_children("good")
    async with running(tmp_path, 1) as ranks:
        ranks.kv(CancelSend(handoff=HandoffId("over", 0, 0)))
        await within(1, "rank 0 failed: internal_error: its thread is over", ranks)
    children[0].wait(timeout=5)


async def test_noise_from_a_rank_is_an_error(tmp_path, start_children):
    children = start_children("garbage")
    async with running(tmp_path, 1) as ranks:
        ranks.submit(batch(0))
        await within(1, "cannot be read", ranks)
        children[0].kill()


async def test_a_step_that_hangs_is_noticed_by_its_deadline(tmp_path, start_children):
    children = start_children("hang")
    async with running(tmp_path, 1, step_timeout_s=0.3) as ranks:
        ranks.submit(batch(BAD_STEP))
        await within(2, f"step {BAD_STEP}: no output within 0.3 s", ranks)
        children[0].kill()


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_stopped_rank_is_noticed_by_its_silence(tmp_path, start_children, victim):
    children = start_children("good", "good")
    async with running(tmp_path, 2, silence_s=2.5) as ranks:
        await ranks.submit(batch(0)).output()
        children[victim].send_signal(signal.SIGSTOP)
        await within(6, f"rank {victim} (pid {children[victim].pid}): nothing heard", ranks)
        children[victim].kill()


class Starving:
    """A ``Starvation`` that says so of everybody, until it does not."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.is_over = False

    def starves(self, process: ProcessId, now_s: float) -> bool:
        self.asked.append(process.pid)
        return not self.is_over


async def test_a_rank_that_only_gets_no_cpu_is_given_longer(tmp_path, start_children):
    children = start_children("good", "good")
    starving = Starving()
    async with running(tmp_path, 2, silence_s=3.0, starvation=starving) as ranks:
        await ranks.submit(batch(0)).output()
        children[1].send_signal(signal.SIGSTOP)
        await asyncio.wait((ranks.failed,), timeout=6)
        assert not ranks.failed.done()
        assert children[1].pid in starving.asked
        starving.is_over = True
        await within(8, f"rank 1 (pid {children[1].pid}): nothing heard", ranks)
        children[1].kill()


async def test_a_long_step_is_no_silence(tmp_path, start_children):
    children = start_children("hang")
    async with running(tmp_path, 1, silence_s=2.5) as ranks:
        ranks.submit(batch(BAD_STEP))
        await asyncio.wait((ranks.failed,), timeout=4)
        assert not ranks.failed.done()
        children[0].kill()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("fail-start", "rank 1 failed: model_files_error: model.safetensors: damaged"),
        ("die-start", "rank 1: ended before it was ready"),
    ],
)
async def test_a_rank_that_cannot_start_is_told_at_once(tmp_path, start_children, kind, error):
    start_children("good", kind)
    with pytest.raises(RankError, match=error):
        async with running(tmp_path, 2):
            pass
    assert left_by_the_front(tmp_path) == []


async def test_a_rank_that_is_never_ready_is_named_at_the_deadline(tmp_path, start_children):
    start_children("good", "silent")
    with pytest.raises(RankError, match=r"ranks (0, )?1: not ready within 1"):
        await start_ranks(run_dir=tmp_path, tp_size=2, start_timeout_s=1, step_timeout_s=1)


async def test_no_rank_at_all_is_an_error_at_the_deadline(tmp_path):
    with pytest.raises(RankError, match=r"ranks 0: not ready within 0\.1 s"):
        await start_ranks(run_dir=tmp_path, tp_size=1, start_timeout_s=0.1, step_timeout_s=1)
    assert left_by_the_front(tmp_path) == []


@pytest.mark.parametrize("num_steps", [0, 1, BAD_STEP + 1])
def test_no_rank_outlives_a_front_that_is_killed(tmp_path, start_children, num_steps):
    children = start_children("hang", "hang")  # in step 3, if it comes to that
    command = [sys.executable, "-m", "tests.rank.front_child", str(tmp_path), str(num_steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as front:
        assert front.stdout is not None
        assert front.stdout.readline() == b"running\n"
        front.kill()
    for child in children:
        child.wait(timeout=6)


@pytest.mark.parametrize("num_tokens", [256, 2048, 8192])
def test_the_logprobs_of_a_step_full_of_prompt_tokens_are_one_part_of_the_ring(
    tmp_path: Path, num_tokens: int
) -> None:
    top = tuple((token, -1.5 - token) for token in range(MAX_PROMPT_LOGPROBS))
    each = PromptLogprob(logprob=-0.5, rank=7, top=top)
    scored = Scored(chunk=0, start=1, logprobs=(each,) * num_tokens)
    output = StepOutput(step=3, sampled=(), scored=(scored,))
    path = tmp_path / "out"
    create_ring(path, capacity=outputs_bytes(num_tokens), num_readers=1)
    reader = RingReader(path)
    writer = RingWriter(path)
    assert len(encode(output)) <= writer.max_part_bytes
    assert writer.try_write(encode(output))
    record = reader.read(timeout_s=5)
    assert record is not None
    assert decode(record) == output
    writer.close()
    reader.close()
