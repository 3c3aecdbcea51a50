"""A peer's process is killed or stopped at each stage: named failures in time, a successor."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kv_transfer.commands import (
    AcceptPeer,
    CancelReceive,
    CancelSend,
    ConnectPeer,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    Peer,
    PeerConnected,
    PeerLost,
    ReceiveDrained,
    SendDrained,
)
from pdserve.core.config import KvTransferConfig
from tests.kv_transfer.nodes import CONFIG, Node, connect, handoff, open_world, prompt_kv
from tests.kv_transfer.peer_child import NUM_TOKENS, PART, TABLE, run_peer

TRANSPORTS = ["grpc", "gloo"]
IMPATIENT = replace(CONFIG, timeout_s=2.0)


class Child:
    """A node in another process; ``peer`` is its record."""

    def __init__(
        self, role: str, transport: str, stage: str, config: KvTransferConfig = CONFIG
    ) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(["tests.kv_transfer.peer_child"])
        self.pipe, other_end = forks.Pipe()
        self.process = forks.Process(
            target=run_peer, args=(role, transport, stage, config, other_end)
        )
        self.process.start()
        other_end.close()
        assert self.pipe.poll(60), "the child did not start"
        self.peer: Peer = self.pipe.recv()

    def meet(self, other: Peer) -> None:
        self.pipe.send(other)

    def wait_for_stage(self) -> None:
        assert self.pipe.poll(30), "the child did not come to its stage"
        self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """SIGSTOP: alive, and silent."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)


@contextmanager
def a_child(
    role: str, transport: str, stage: str, config: KvTransferConfig = CONFIG
) -> Iterator[Child]:
    child = Child(role, transport, stage, config)
    try:
        yield child
    finally:
        child.kill()
        child.pipe.close()
        child.process.close()


def move(sender: Node, receiver: Node) -> None:
    """The survivor works on with another peer, in the same blocks."""
    connect(sender, receiver)
    kv = prompt_kv(sender.layout, NUM_TOKENS, 2)
    sender.write(kv, TABLE)
    receiver.expect(handoff("next"), sender.peer_id, NUM_TOKENS, TABLE)
    sender.push(handoff("next"), receiver.peer_id, range(NUM_TOKENS), TABLE)
    receiver.wait(HandoffReceived, handoff("next"))
    sender.wait(HandoffSent, handoff("next"))
    assert receiver.holds(kv, TABLE)


def push(sender: Node, child: Child, *, last: bool) -> None:
    sender.write(prompt_kv(sender.layout, NUM_TOKENS, 1), TABLE)
    tokens = range(NUM_TOKENS if last else PART)
    sender.push(handoff("a"), child.peer.peer_id, tokens, TABLE, last=last)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", ["not welcome", "idle", "frames held", "half received"])
def test_a_killed_receiver_is_lost_at_once_and_a_successor_is_served(
    transport: str, stage: str
) -> None:
    with open_world(transport) as world, a_child("d", transport, stage) as child:
        sender = world.node("p")
        sender.tell(ConnectPeer(peer=child.peer))
        child.meet(sender.peer)
        child.wait_for_stage()
        if stage != "not welcome":
            sender.wait(PeerConnected)
        if stage != "idle":
            push(sender, child, last=stage == "frames held")
        killed_s = time.monotonic()
        child.kill()
        sender.wait(PeerLost)
        assert time.monotonic() - killed_s < 5, "the connection's end was not noticed"
        if stage != "idle":
            assert sender.wait(HandoffFailed, handoff("a"))[0].kind == "link_down_error"
            sender.tell(CancelSend(handoff=handoff("a")))
            sender.wait(SendDrained, handoff("a"))
        move(sender, world.node("d2"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", ["idle", "half sent"])
def test_a_killed_sender_is_lost_at_once_and_a_successor_is_served(
    transport: str, stage: str
) -> None:
    with open_world(transport) as world, a_child("p", transport, stage) as child:
        receiver = world.node("d")
        receiver.tell(AcceptPeer(peer=child.peer))
        receiver.expect(handoff("a"), "p", NUM_TOKENS, TABLE)
        child.meet(receiver.peer)
        child.wait_for_stage()
        receiver.wait(PeerConnected)
        killed_s = time.monotonic()
        child.kill()
        receiver.wait(PeerLost)
        assert time.monotonic() - killed_s < 5, "the connection's end was not noticed"
        assert receiver.wait(HandoffFailed, handoff("a"))[0].kind == "link_down_error"
        receiver.tell(CancelReceive(handoff=handoff("a")))
        receiver.wait(ReceiveDrained, handoff("a"))
        move(world.node("p2"), receiver)


def test_a_stopped_receiver_is_lost_within_the_deadline() -> None:
    with (
        open_world("grpc") as world,
        a_child("d", "grpc", "half received", IMPATIENT) as child,
    ):
        sender = world.node("p", config=IMPATIENT)
        sender.tell(ConnectPeer(peer=child.peer))
        child.meet(sender.peer)
        child.wait_for_stage()
        sender.wait(PeerConnected)
        child.stop()
        push(sender, child, last=True)
        assert sender.wait(HandoffFailed, handoff("a"))[0].kind == "transfer_timeout_error"
        sender.wait(PeerLost)
        sender.tell(CancelSend(handoff=handoff("a")))
        sender.wait(SendDrained, handoff("a"))
        move(sender, world.node("d2"))


def test_a_stopped_sender_is_lost_within_the_deadline() -> None:
    with (
        open_world("grpc") as world,
        a_child("p", "grpc", "half sent", IMPATIENT) as child,
    ):
        receiver = world.node("d", config=IMPATIENT)
        receiver.tell(AcceptPeer(peer=child.peer))
        receiver.expect(handoff("a"), "p", NUM_TOKENS, TABLE)
        child.meet(receiver.peer)
        child.wait_for_stage()
        receiver.wait(PeerConnected)
        child.stop()
        assert receiver.wait(HandoffFailed, handoff("a"))[0].kind == "transfer_timeout_error"
        receiver.wait(PeerLost)
        move(world.node("p2"), receiver)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kv_arrives_from_process_to_process(transport: str) -> None:
    with open_world(transport) as world, a_child("d", transport, "received") as child:
        sender = world.node("p")
        sender.tell(ConnectPeer(peer=child.peer))
        child.meet(sender.peer)
        sender.wait(PeerConnected)
        push(sender, child, last=True)
        sender.wait(HandoffSent, handoff("a"))
        child.wait_for_stage()
