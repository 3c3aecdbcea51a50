"""Real rank processes, each with a GPU of its own or on one together: a prompt prefilled in one is
continued in the other.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_transfer.commands import (
    AcceptPeer,
    ConnectPeer,
    ExpectHandoff,
    HandoffReceived,
    HandoffSent,
    Peer,
    PeerConnected,
    PushTokens,
)
from pdserve.core.config import KvTransferConfig
from pdserve.core.request import HandoffId
from pdserve.engine.batch import Carried
from pdserve.engine.parallel import SoloGroup
from pdserve.engine.runner import ModelRunner
from pdserve.rank.ranks import Ranks
from pdserve.rank.ring_ranks import RingRanks, start_ranks
from pdserve.rank.spec import RankSpec
from tests.rank.test_process import (
    NUM_TOKENS,
    PROMPT,
    blocks,
    continued,
    decode_batch,
    events,
    processes,
    prompt_batch,
)
from tests.rank.tiny_llama import tiny_engine_config

pytestmark = [
    pytest.mark.timeout(200, func_only=True),
    pytest.mark.usefixtures("others_leave_memory"),
]

WAYS = [
    pytest.param("cuda_ipc", "cuda:0", marks=pytest.mark.gpu),
    pytest.param("cuda_ipc", "cuda:1", marks=pytest.mark.multigpu),
    pytest.param("nccl", "cuda:1", marks=pytest.mark.multigpu),
]


@pytest.fixture(scope="module")
def expected() -> Sequence[int]:
    """Greedy tokens of a runner in this process, on the first GPU."""
    runner = ModelRunner(replace(tiny_engine_config(Path("tiny")), device="cuda:0"), SoloGroup())
    batches = [prompt_batch(0), *(decode_batch(i, Carried(), 0) for i in range(1, NUM_TOKENS))]
    return [runner.launch(batch).wait().sampled[0].tokens[0] for batch in batches]


def share_in_use(device: str) -> float:
    """Of the GPU's memory, by whomever: a node counts its neighbours' as its own."""
    free, total = torch.cuda.mem_get_info(device)
    return 1 - free / total


@asynccontextmanager
async def node(
    tmp_path: Path, peer_id: str, transport: str, device: str
) -> AsyncIterator[RingRanks]:
    run_dir = tmp_path / peer_id
    run_dir.mkdir()
    spec = RankSpec(
        node=peer_id,
        peer_id=peer_id,
        run_dir=run_dir,
        engine=replace(
            tiny_engine_config(Path("tiny")),
            device=device,
            gpu_memory_utilization=share_in_use(device) + 0.1,
        ),
        kv_transfer=KvTransferConfig(transport=transport),
        host="127.0.0.1",
        port_range=None,
        start_timeout_s=90,
    )
    with processes([spec]) as children:
        ranks = await start_ranks(run_dir=run_dir, tp_size=1, start_timeout_s=90, step_timeout_s=30)
        try:
            yield ranks
        finally:
            await ranks.close()
        assert [child.wait(timeout=20) for child in children] == [0]


@pytest.mark.parametrize(("transport", "device"), WAYS)
async def test_a_prompt_prefilled_by_one_process_is_continued_by_another(
    tmp_path: Path, expected: Sequence[int], transport: str, device: str
) -> None:
    def peer(peer_id: str, ranks: Ranks) -> Peer:
        return Peer(
            peer_id=peer_id,
            layout=ranks.layout,
            transport=transport,
            addresses=ranks.addresses,
        )

    async with (
        node(tmp_path, "prefill-0", transport, "cuda:0") as prefill,
        node(tmp_path, "decode-0", transport, device) as decode,
    ):
        assert min(prefill.num_blocks, decode.num_blocks) > 100_000  # what the memory holds
        prefill.kv(ConnectPeer(peer=peer("decode-0", decode)))
        decode.kv(AcceptPeer(peer=peer("prefill-0", prefill)))
        assert await events(prefill, 1) == [PeerConnected(peer_id="decode-0")]
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
        assert all(isinstance(event, HandoffSent) for event in await events(prefill, 1))
        assert all(isinstance(event, HandoffReceived) for event in await events(decode, 1))
        assert [first, *await continued(decode, first)] == expected
