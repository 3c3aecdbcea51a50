"""Two processes, one of which reads the other's blocks: KV arrives, and a peer that dies or stops
at any stage is an error by name within the deadline and has a successor.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from kv_transfer.commands import (
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    PeerConnected,
    PeerLost,
)
from tests.gpu.kv_children import Child, connect, move
from tests.gpu.transfers import CONFIG, LAYOUT, NUM_BLOCKS, NUM_TOKENS, TABLE, kv_of
from tests.kv_transfer.conftest import no_thread_is_left
from tests.kv_transfer.lending import CUDA_IPC
from tests.kv_transfer.nodes import Node, World, handoff

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

__all__ = ["no_thread_is_left"]

DEVICES = ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.multigpu)]  # of the peers
MOMENTS = (("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 1))  # 0: a cache is offered, 1: a frame
FATES = [(role, *moment) for role in ("sender", "receiver") for moment in MOMENTS]
SLACK_S = 4.0


@pytest.fixture(scope="module", params=DEVICES)
def children(request: pytest.FixtureRequest) -> Iterator[dict[object, Child]]:
    """All start together: loading takes most of the time. None: a healthy one."""
    started: dict[object, Child] = {None: Child("healthy", CUDA_IPC, request.param)}
    for number, (role, sig, operation) in enumerate(FATES):
        fate = sig, operation
        started[role, sig, operation] = Child(f"mortal-{number}", CUDA_IPC, request.param, *fate)
    try:
        for child in started.values():
            child.peer  # noqa: B018 - waits until it is ready
        yield started
    finally:
        for child in started.values():
            child.end()


@pytest.fixture
def survivor() -> Iterator[Node]:
    node = Node(
        f"survivor-{time.monotonic_ns()}",
        LAYOUT,
        CUDA_IPC,
        World(CUDA_IPC).open_wire,
        config=CONFIG,
        num_blocks=NUM_BLOCKS,
        padding=0,
        device=torch.device("cuda:0"),
    )
    node.write(kv_of(NUM_TOKENS), TABLE[: LAYOUT.num_blocks_for(NUM_TOKENS)])
    yield node
    node.close()


def check_move(survivor: Node, child: Child, role: str, name: str) -> None:
    """A handoff with ``child`` as ``role`` arrives bit by bit."""
    move(survivor, child, role, name)
    if role == "sender":
        survivor.wait(HandoffReceived, handoff(name))
        assert survivor.holds(kv_of(NUM_TOKENS), TABLE[::-1])
        child.read_until("HandoffSent")
    else:
        survivor.wait(HandoffSent, handoff(name))
        child.read_until("HandoffReceived")
        child.tell("check", survivor.peer_id)
        child.read_until("same")


@pytest.mark.parametrize(("role", "sig", "operation"), FATES)
def test_the_survivor_names_it_in_time_and_serves_the_successor(
    role: str, sig: str, operation: int, survivor: Node, children: dict[object, Child]
) -> None:
    mortal = children[role, sig, operation]
    start = time.monotonic()
    connect(survivor, mortal, role)
    if operation:
        survivor.wait(PeerConnected)
        move(survivor, mortal, role, "doomed")
        start = time.monotonic()
    survivor.wait(PeerLost)
    assert time.monotonic() - start < CONFIG.timeout_s + SLACK_S
    if operation:
        failed = survivor.wait(HandoffFailed, handoff("doomed"))[0]
        assert failed.kind in ("link_down_error", "transfer_timeout_error")
    mortal.end()

    healthy = children[None]
    connect(survivor, healthy, role)
    survivor.wait(PeerConnected)
    check_move(survivor, healthy, role, f"after-{mortal.peer_id}")
