"""A peer that dies or stops, at any stage of a link's life, is an error by name within the
deadline; the survivor goes on computing meanwhile and serves the peer's successor.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

import pytest
import torch

from kv_transfer.commands import (
    AcceptPeer,
    ConnectPeer,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    KvEvent,
    Peer,
    PeerConnected,
    PeerLost,
    PushTokens,
)
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


class Child:
    """A peer in a process of its own."""

    def __init__(self, peer_id: str, *fate: object) -> None:
        self.peer_id = peer_id
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.kv_peer", peer_id, "cuda:1", *map(str, fate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            address = self.read().removeprefix("ready ")
            self._peer = Peer(
                peer_id=self.peer_id, layout=LAYOUT, transport="nccl", addresses=(address,)
            )
        return self._peer

    def tell(self, command: str, peer_id: str, word: str = "-") -> None:
        pipe = _opened(self.process.stdin)
        pipe.write(f"{command} {peer_id} {word}\n")
        pipe.flush()

    def read(self) -> str:
        return _opened(self.process.stdout).readline().strip()

    def read_until(self, wanted: str) -> None:
        while (line := self.read()) != wanted:
            assert line, f"{self.peer_id} ended before it said {wanted}"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _opened(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@pytest.fixture(scope="module")
def children() -> Iterator[dict[tuple[str, str, int] | None, Child]]:
    """All of them start together: loading takes most of the time. None: a healthy one."""
    started: dict[tuple[str, str, int] | None, Child] = {None: Child("healthy")}
    for number, (role, sig, operation) in enumerate(FATES):
        started[role, sig, operation] = Child(f"mortal-{number}", sig, operation)
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


def connect(survivor: Node, child: Child, role: str) -> None:
    address = survivor.peer.addresses[0]
    if role == "sender":
        survivor.tell(AcceptPeer(peer=child.peer))
        child.tell("connect", survivor.peer_id, address)
    else:
        child.peer  # noqa: B018 - waits until it is ready
        child.tell("accept", survivor.peer_id, address)
        survivor.tell(ConnectPeer(peer=child.peer))


def move(survivor: Node, child: Child, role: str, name: str) -> None:
    table = TABLE[: LAYOUT.num_blocks_for(NUM_TOKENS)]
    if role == "sender":
        survivor.tell(
            ExpectHandoff(
                handoff=handoff(name),
                peer_id=child.peer_id,
                start=0,
                num_tokens=NUM_TOKENS,
                blocks=TABLE[::-1][: len(table)],
            )
        )
        child.tell("push", survivor.peer_id, name)
    else:
        child.tell("expect", survivor.peer_id, name)
        survivor.tell(
            PushTokens(
                handoff=handoff(name),
                peer_id=child.peer_id,
                start=0,
                stop=NUM_TOKENS,
                blocks=table,
                last=True,
            )
        )


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
