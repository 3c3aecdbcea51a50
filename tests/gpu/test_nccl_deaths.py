"""A peer that dies or stops, at any stage of a link's life, is an error by name within the
deadline; the survivor goes on computing meanwhile and serves the peer's successor.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from kv_transfer.commands import (
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    KvEvent,
    PeerConnected,
    PeerLost,
)
from tests.gpu.kv_children import Child, connect, move
from tests.gpu.transfers import CONFIG, LAYOUT, NUM_BLOCKS, NUM_TOKENS, TABLE, kv_of
from tests.kv_transfer.conftest import no_thread_is_left
from tests.kv_transfer.nodes import Node, World, handoff

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(180)]

__all__ = ["no_thread_is_left"]

SIGNALS = ("SIGKILL", "SIGSTOP")
ROLES = ("sender", "receiver")  # of the peer that dies
OPERATIONS = (0, 1, 2, 4)
FIRST_FRAME = 3  # the operations before it make the link
SLACK_S = 4.0  # beyond the deadline: NCCL's abort, the endpoint's ticks, a busy machine
FATES = [(role, sig, op) for role in ROLES for sig in SIGNALS for op in OPERATIONS]


@pytest.fixture(scope="module")
def children() -> Iterator[dict[tuple[str, str, int] | None, Child]]:
    """All of them start together: loading takes most of the time. None: a healthy one."""
    started: dict[tuple[str, str, int] | None, Child] = {None: Child("healthy", "nccl", "cuda:1")}
    for number, (role, sig, operation) in enumerate(FATES):
        fate = sig, operation
        started[role, sig, operation] = Child(f"mortal-{number}", "nccl", "cuda:1", *fate)
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
        "nccl",
        World("nccl").open_wire,
        config=CONFIG,
        num_blocks=NUM_BLOCKS,
        padding=0,
        device=torch.device("cuda:0"),
    )
    node.write(kv_of(NUM_TOKENS), TABLE[: LAYOUT.num_blocks_for(NUM_TOKENS)])
    yield node
    node.close()


def compute_until(survivor: Node, kind: type[KvEvent]) -> float:
    """Keep the survivor's GPU busy until the event; the longest that one product took, seconds."""
    x = torch.randn(2048, 2048, device="cuda:0")
    (x @ x).sum().item()  # the first product loads its library
    longest = 0.0
    while True:
        start = time.monotonic()
        (x @ x).sum().item()
        longest = max(longest, time.monotonic() - start)
        seen = survivor.leftover()
        if any(isinstance(event, kind) for event in seen):
            return longest


@pytest.mark.parametrize(("role", "sig", "operation"), FATES)
def test_the_survivor_names_it_in_time_goes_on_and_serves_the_successor(
    role: str,
    sig: str,
    operation: int,
    survivor: Node,
    children: dict[tuple[str, str, int] | None, Child],
) -> None:
    mortal = children[role, sig, operation]
    mortal.peer  # noqa: B018 - waits until it is ready
    start = time.monotonic()
    connect(survivor, mortal, role)
    if operation >= FIRST_FRAME:
        survivor.wait(PeerConnected)
        move(survivor, mortal, role, "doomed")
        start = time.monotonic()
    longest_s = compute_until(survivor, PeerLost)
    assert time.monotonic() - start < CONFIG.timeout_s + SLACK_S
    assert longest_s < 2.0
    survivor.wait(PeerLost)
    if operation >= FIRST_FRAME:
        failed = survivor.wait(HandoffFailed, handoff("doomed"))[0]
        assert failed.kind in ("link_down_error", "transfer_timeout_error")
    mortal.end()

    healthy = children[None]
    connect(survivor, healthy, role)
    survivor.wait(PeerConnected)
    name = f"after-{mortal.peer_id}"
    move(survivor, healthy, role, name)
    if role == "sender":
        survivor.wait(HandoffReceived, handoff(name))
        assert survivor.holds(kv_of(NUM_TOKENS), TABLE[::-1])
        healthy.read_until("HandoffSent")
    else:
        survivor.wait(HandoffSent, handoff(name))
        healthy.read_until("HandoffReceived")
        healthy.tell("check", survivor.peer_id)
        healthy.read_until("same")
