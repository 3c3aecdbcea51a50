"""What a handoff over NCCL takes between two GPUs, by size and frame: ``python -m
tests.gpu.nccl_bandwidth``.

Llama-3-8B's KV, blocks of 16 tokens (2 MiB) in random order, through two KvEndpoints in two
processes; the time is the sender's, from the push of a whole prompt to the last acknowledgement, so
gather, announcement, transfer, scatter and answer are in it. Medians.
"""

import json
import random
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

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
from pdserve.core.environment import set_up_gpu_rank
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.rank.process import SWITCH_INTERVAL_S
from tests.kv_transfer.nodes import Node, World, handoff

LAYOUT = KvLayout(
    num_layers=32, num_kv_heads=8, head_size=128, block_size=16, dtype="bfloat16", tp_size=1
)
NUM_BLOCKS = 600
TOKENS = (16, 128, 512, 2048, 8000)
FRAMES = (2 << 20, 8 << 20, 16 << 20)
ROUNDS = 7


def make_node(peer_id: str, device: str, frame_bytes: int) -> Node:
    config = KvTransferConfig(
        frame_bytes=frame_bytes, staging_bytes=4 * frame_bytes, timeout_s=20.0
    )
    return Node(
        peer_id,
        LAYOUT,
        "nccl",
        World("nccl").open_wire,
        config=config,
        num_blocks=NUM_BLOCKS,
        padding=0,
        device=torch.device(device),
    )


def table_of(num_tokens: int, seed: int) -> tuple[BlockId, ...]:
    blocks = random.Random(seed).sample(range(NUM_BLOCKS), LAYOUT.num_blocks_for(num_tokens))
    return tuple(map(BlockId, blocks))


def receive(pipe: Connection, frame_bytes: int) -> None:
    """The receiving process: expects what it is told to, until it is told None."""
    set_up_gpu_rank()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    node = make_node("d", "cuda:1", frame_bytes)
    sender: Peer = pipe.recv()
    node.tell(AcceptPeer(peer=sender))
    pipe.send(node.peer)
    node.wait(PeerConnected)
    while (told := pipe.recv()) is not None:
        name, num_tokens = told
        node.tell(
            ExpectHandoff(
                handoff=handoff(name),
                peer_id="p",
                start=0,
                num_tokens=num_tokens,
                blocks=table_of(num_tokens, 2),
            )
        )
        pipe.send("expected")
        node.wait(HandoffReceived, handoff(name))
    node.close()


def measure(frame_bytes: int) -> None:
    """Print one JSON line a size."""
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=receive, args=(there, frame_bytes))
    child.start()
    node = make_node("p", "cuda:0", frame_bytes)
    here.send(node.peer)
    node.tell(ConnectPeer(peer=here.recv()))
    node.wait(PeerConnected)
    for num_tokens in TOKENS:
        seconds = []
        for number in range(ROUNDS + 2):
            name = f"{num_tokens}-{number}"
            here.send((name, num_tokens))
            here.recv()
            start = time.perf_counter()
            node.tell(
                PushTokens(
                    handoff=handoff(name),
                    peer_id="d",
                    start=0,
                    stop=num_tokens,
                    blocks=table_of(num_tokens, 1),
                    last=True,
                )
            )
            node.wait(HandoffSent, handoff(name))
            seconds.append(time.perf_counter() - start)
        median_s = statistics.median(seconds[2:])
        figures = {
            "frame_mib": frame_bytes >> 20,
            "tokens": num_tokens,
            "mib": num_tokens * LAYOUT.token_bytes / (1 << 20),
            "ms": round(median_s * 1e3, 3),
            "gb_per_s": round(num_tokens * LAYOUT.token_bytes / median_s / 1e9, 1),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
    here.send(None)
    child.join()
    node.close()


if __name__ == "__main__":
    set_up_gpu_rank()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for frame in FRAMES:
        measure(frame)
