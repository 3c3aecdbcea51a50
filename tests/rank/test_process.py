"""Real rank processes with a small random model: a plain runner's tokens, whatever the TP size."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from kv_transfer.commands import (
    AcceptPeer,
    ConnectPeer,
    ExpectHandoff,
    HandoffReceived,
    HandoffSent,
    KvEvent,
    Peer,
    PeerConnected,
    PushTokens,
)
from pdserve.core.config import KvTransferConfig
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import HandoffId, SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.engine.parallel import SoloGroup
from pdserve.engine.runner import ModelRunner
from pdserve.rank.inline import start_inline_ranks
from pdserve.rank.launch import start_rank_process
from pdserve.rank.process import open_parts
from pdserve.rank.ranks import Ranks
from pdserve.rank.ring_ranks import RingRanks, start_ranks
from pdserve.rank.spec import RankSpec
from tests.rank.tiny_llama import tiny_engine_config

PROMPT = (5, 17, 3, 42, 8, 90, 11, 63, 27, 34)
NUM_TOKENS = 12
BLOCK_SIZE = 4


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def prompt_batch(first_block: int) -> Batch:
    table = blocks(*range(first_block, first_block + 3))
    joined = Joined(
        slot=Slot(0),
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
        choices=(0,),
        end_token_ids=(2,),
        prompt_len=len(PROMPT),
        history=(),
        blocks=table,
    )
    chunk = Chunk(slot=Slot(0), start=0, tokens=PROMPT, new_blocks=(), num_samples=1)
    return Batch(step=0, joined=(joined,), chunks=(chunk,))


def decode_batch(step: int, tokens: tuple[int, ...] | Carried, first_block: int) -> Batch:
    start = len(PROMPT) + step - 1
    is_new_block = start % BLOCK_SIZE == 0
    new_blocks = blocks(first_block + start // BLOCK_SIZE) if is_new_block else ()
    chunk = Chunk(slot=Slot(0), start=start, tokens=tokens, new_blocks=new_blocks, num_samples=1)
    return Batch(step=step, chunks=(chunk,))


@pytest.fixture(scope="module")
def expected() -> Sequence[int]:
    """Greedy tokens of a runner in this process, without rings, ranks or transfer."""
    torch.set_num_threads(1)
    runner = ModelRunner(tiny_engine_config(Path("tiny")), SoloGroup())
    batches = [prompt_batch(0), *(decode_batch(i, Carried(), 0) for i in range(1, NUM_TOKENS))]
    return [runner.launch(batch).wait().sampled[0].tokens[0] for batch in batches]


async def generate(ranks: Ranks) -> Sequence[int]:
    """The same tokens with two steps in flight."""
    in_flight = [ranks.submit(prompt_batch(0))]
    tokens = []
    for step in range(1, NUM_TOKENS + 1):
        if step < NUM_TOKENS:
            in_flight.append(ranks.submit(decode_batch(step, Carried(), 0)))
        output = await in_flight.pop(0).output()
        tokens.append(output.sampled[0].tokens[0])
    return tokens


def rank_specs(run_dir: Path, peer_id: str, tp_size: int) -> list[RankSpec]:
    return [
        RankSpec(
            node=peer_id,
            peer_id=peer_id,
            run_dir=run_dir,
            engine=tiny_engine_config(Path("tiny"), tp_size=tp_size, tp_rank=rank),
            kv_transfer=KvTransferConfig(transport="grpc"),
            host="127.0.0.1",
            port_range=None,
            start_timeout_s=60,
        )
        for rank in range(tp_size)
    ]


@contextmanager
def processes(specs: Sequence[RankSpec]) -> Iterator[list["subprocess.Popen[bytes]"]]:
    with ExitStack() as stack:
        children = []
        for spec in specs:
            child = start_rank_process(spec)
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        yield children


@asynccontextmanager
async def node(tmp_path: Path, peer_id: str, tp_size: int) -> AsyncIterator[RingRanks]:
    run_dir = tmp_path / peer_id
    run_dir.mkdir()
    with processes(rank_specs(run_dir, peer_id, tp_size)) as children:
        ranks = await start_ranks(
            run_dir=run_dir, tp_size=tp_size, start_timeout_s=60, step_timeout_s=30
        )
        try:
            yield ranks
        finally:
            await ranks.close()
        assert [child.wait(timeout=10) for child in children] == [0] * tp_size


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_rank_processes_give_the_tokens_of_a_plain_runner(tmp_path, expected, tp_size):
    async with node(tmp_path, "decode-0", tp_size) as ranks:
        assert await generate(ranks) == expected


async def test_inline_ranks_give_the_tokens_of_a_plain_runner(tmp_path, expected):
    [spec] = rank_specs(tmp_path, "inline", 1)
    ranks = await start_inline_ranks(partial(open_parts, spec), step_timeout_s=30)
    assert await generate(ranks) == expected
    await ranks.close()


async def test_a_chunk_of_an_unknown_sequence_fails_the_ranks_by_name(tmp_path):
    [spec] = rank_specs(tmp_path, "inline", 1)
    ranks = await start_inline_ranks(partial(open_parts, spec), step_timeout_s=30)
    chunk = Chunk(slot=Slot(0), start=0, tokens=(5,), new_blocks=blocks(0), num_samples=1)
    with pytest.raises(RankError, match="no sequence is in slot 0"):
        await ranks.submit(Batch(step=0, chunks=(chunk,))).output()
    await ranks.close()


async def test_a_prompt_prefilled_on_one_node_is_continued_on_another(tmp_path, expected):
    async with (
        node(tmp_path, "prefill-0", 2) as prefill,
        node(tmp_path, "decode-0", 1) as decode,
    ):
        prefill.kv(ConnectPeer(peer=peer("decode-0", decode)))
        decode.kv(AcceptPeer(peer=peer("prefill-0", prefill)))
        assert await events(prefill, 2) == [PeerConnected(peer_id="decode-0")] * 2
        assert await events(decode, 1) == [PeerConnected(peer_id="prefill-0")]

        handoff = HandoffId("request", 0, 0)
        decode.kv(
            ExpectHandoff(
                handoff=handoff,
                peer_id="prefill-0",
                start=0,
                num_tokens=len(PROMPT),
                blocks=blocks(20, 21, 22),
            )
        )
        first = (await prefill.submit(prompt_batch(7)).output()).sampled[0].tokens[0]
        prefill.kv(
            PushTokens(
                handoff=handoff,
                peer_id="decode-0",
                start=0,
                stop=len(PROMPT),
                blocks=blocks(7, 8, 9),
                last=True,
            )
        )
        assert all(isinstance(event, HandoffSent) for event in await events(prefill, 2))
        assert all(isinstance(event, HandoffReceived) for event in await events(decode, 1))
        assert [first, *await continued(decode, first)] == expected


async def continued(ranks: Ranks, first: int) -> Sequence[int]:
    """Decode on from the first token, whose KV is the prompt's in blocks 20 to 22."""
    join = prompt_batch(20).joined
    step = decode_batch(1, (first,), 20)
    batches = [Batch(step=0), Batch(step=1, joined=join, chunks=step.chunks)]
    batches += [decode_batch(step, Carried(), 20) for step in range(2, NUM_TOKENS)]
    steps = [ranks.submit(batch) for batch in batches]
    outputs = [await step.output() for step in steps]
    return [output.sampled[0].tokens[0] for output in outputs[1:]]


def peer(peer_id: str, ranks: Ranks) -> Peer:
    return Peer(peer_id=peer_id, layout=ranks.layout, transport="grpc", addresses=ranks.addresses)


async def events(ranks: Ranks, count: int) -> list[KvEvent]:
    return [(await asyncio.wait_for(ranks.next_event(), 20))[1] for _ in range(count)]
