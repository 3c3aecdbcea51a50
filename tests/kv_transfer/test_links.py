"""Links between nodes: who is let in, what waits for whom, what breaks and how it is made again."""

from dataclasses import replace
from queue import SimpleQueue
from typing import cast

import pytest

from kv_transfer.commands import (
    AcceptPeer,
    ClosePeer,
    ConnectPeer,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    KvCommand,
    Peer,
    PeerConnected,
    PeerLost,
)
from kv_transfer.local_rank import LINK_VERSION
from kv_transfer.messages import Hello, Message, Refused
from kv_transfer.transports.transport import Arrived, StreamEvents
from tests.kv_transfer.nodes import (
    LAYOUT,
    Node,
    World,
    blocks,
    connect,
    handoff,
    layout,
    prompt_kv,
)

OURS, THEIRS = blocks(1, 2, 3), blocks(7, 8, 9)


def move(sender: Node, receiver: Node, name: str = "a") -> None:
    """A handoff of 40 tokens that must arrive."""
    kv = prompt_kv(sender.layout, 40, len(name))
    sender.write(kv, OURS)
    receiver.expect(handoff(name), sender.peer_id, 40, THEIRS)
    sender.push(handoff(name), receiver.peer_id, range(40), OURS)
    receiver.wait(HandoffReceived, handoff(name))
    sender.wait(HandoffSent, handoff(name))
    assert receiver.holds(kv, THEIRS)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("peer_id", {"peer_id": "an earlier one"}),
        ("transport", {"transport": "nccl"}),
        ("tp_size", {"layout": layout(tp_size=2), "addresses": ("x:1", "x:2")}),
        ("block_size", {"layout": layout(block_size=8)}),
    ],
)
def test_a_sender_that_is_not_what_our_front_described_is_refused_by_field(
    world: World, field: str, changes: dict[str, str | tuple[str, ...]]
) -> None:
    sender, receiver = world.node("p"), world.node("d")
    described = replace(sender.peer, **changes)  # type: ignore[arg-type]
    if field == "peer_id":  # the receiver's front knows another incarnation at this address
        described = receiver.peer
        sender.tell(ConnectPeer(peer=replace(receiver.peer, peer_id="an earlier one")))
        receiver.tell(AcceptPeer(peer=sender.peer))
    else:
        receiver.tell(AcceptPeer(peer=described))
        sender.tell(ConnectPeer(peer=receiver.peer))
    assert f"handshake: {field} differs" in sender.wait(PeerLost)[0].reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": layout(num_layers=3)}, "num_layers differs: here 4, there 3; serve the same"),
        ({"layout": layout(dtype="bfloat16")}, "dtype differs: here 'float32', there 'bfloat16'"),
        ({"transport": "pigeon"}, "'pigeon' is not one of cuda_ipc, gloo, grpc, loopback, nccl"),
        ({"addresses": ("a:1", "b:2")}, "addresses differs"),
    ],
)
def test_a_peer_that_can_not_fit_is_refused_before_any_connection(
    world: World, changes: dict[str, str | tuple[str, ...]], reason: str
) -> None:
    sender, receiver = world.node("p"), world.node("d")
    other = replace(receiver.peer, **changes)  # type: ignore[arg-type]
    sender.tell(ConnectPeer(peer=other))
    assert reason in sender.wait(PeerLost)[0].reason
    if "addresses" not in changes:  # a receiver does not dial
        receiver.tell(AcceptPeer(peer=replace(sender.peer, **changes)))  # type: ignore[arg-type]
        assert reason in receiver.wait(PeerLost)[0].reason


def test_another_protocol_version_is_refused() -> None:
    world = World("loopback")
    receiver = world.node("d")
    events: StreamEvents = SimpleQueue()
    wire = world.open_wire(events)
    peer = Peer(peer_id="p", layout=LAYOUT, transport="loopback", addresses=(wire.address,))
    receiver.tell(AcceptPeer(peer=peer))
    hello = Hello(
        version=LINK_VERSION + 1, peer_id="p", rank=0, layout=LAYOUT, transport="loopback"
    )
    wire.connect(receiver.endpoints[0].address).send(Message(hello))
    answer = events.get(timeout=5)
    assert isinstance(answer, Arrived)
    assert isinstance(answer.message.body, Refused)
    assert answer.message.body.kind == "handshake_error"
    versions = f"here {LINK_VERSION}, there {LINK_VERSION + 1}"
    assert f"version differs: {versions}; run the same release" in answer.message.body.message
    receiver.close()
    wire.close()


def test_a_sender_may_greet_before_it_is_welcome(world: World) -> None:
    sender, receiver = world.node("p"), world.node("d")
    sender.tell(ConnectPeer(peer=receiver.peer))
    receiver.tell(ClosePeer(peer_id="someone else"))
    receiver.tell(AcceptPeer(peer=sender.peer))
    sender.wait(PeerConnected)
    receiver.wait(PeerConnected)
    move(sender, receiver)


def test_nobody_at_the_address_is_a_lost_peer(world: World) -> None:
    sender, receiver = world.node("p"), world.node("d")
    peer = receiver.peer
    receiver.close()
    sender.tell(ConnectPeer(peer=peer))
    sender.wait(PeerLost)


def test_pushes_wait_for_the_links(world: World) -> None:
    sender, receiver = world.node("p"), world.node("d")
    kv = prompt_kv(sender.layout, 40, 1)
    sender.write(kv, OURS)
    sender.tell(ConnectPeer(peer=receiver.peer))
    sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
    receiver.tell(AcceptPeer(peer=sender.peer))
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
    receiver.wait(HandoffReceived, handoff("a"))
    assert receiver.holds(kv, THEIRS)


def test_frames_wait_for_a_handoff_that_is_not_expected_yet(world: World) -> None:
    sender, receiver = world.pair()
    kv = prompt_kv(sender.layout, 40, 1)
    sender.write(kv, OURS)
    sender.push(handoff("late"), receiver.peer_id, range(40), OURS)
    move_small_meanwhile = handoff("b")
    receiver.expect(move_small_meanwhile, sender.peer_id, 1, blocks(20))
    sender.push(move_small_meanwhile, receiver.peer_id, range(1), blocks(4))
    receiver.wait(HandoffReceived, move_small_meanwhile)
    receiver.expect(handoff("late"), sender.peer_id, 40, THEIRS)
    receiver.wait(HandoffReceived, handoff("late"))
    sender.wait(HandoffSent, handoff("late"))
    assert receiver.holds(kv, THEIRS)


def test_a_handoff_with_an_unknown_peer_fails_by_name(world: World) -> None:
    sender, receiver = world.node("p"), world.node("d")
    sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
    for failed in (
        *sender.wait(HandoffFailed, handoff("a")),
        *receiver.wait(HandoffFailed, handoff("a")),
    ):
        assert failed.kind == "link_down_error"


@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_closing_a_peer_fails_its_handoffs_on_both_sides_and_it_can_come_again(
    world: World, closer: str
) -> None:
    sender, receiver = world.pair(layout(tp_size=2), layout())
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
    sender.push(handoff("a"), receiver.peer_id, range(16), OURS, last=False)
    if closer == "sender":
        sender.tell(ClosePeer(peer_id="d"))
        assert len(receiver.wait(PeerLost)) == 1
    else:
        receiver.tell(ClosePeer(peer_id="p"))
        assert len(sender.wait(PeerLost)) == 2
    for failed in (
        *sender.wait(HandoffFailed, handoff("a")),
        *receiver.wait(HandoffFailed, handoff("a")),
    ):
        assert failed.kind == "link_down_error"
    connect(sender, receiver)
    move(sender, receiver, "again")


def test_connecting_again_makes_new_links(world: World) -> None:
    sender, receiver = world.pair()
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
    sender.push(handoff("a"), receiver.peer_id, range(16), OURS, last=False)
    sender.tell(ConnectPeer(peer=receiver.peer))
    sender.wait(HandoffFailed, handoff("a"))
    receiver.wait(HandoffFailed, handoff("a"))
    sender.wait(PeerConnected)
    receiver.wait(PeerConnected)
    move(sender, receiver, "again")


def test_a_node_made_anew_connects_under_its_new_name(world: World) -> None:
    sender, receiver = world.pair()
    receiver.close()
    sender.wait(PeerLost)
    successor = world.node("d2")
    connect(sender, successor)
    move(sender, successor)


def test_a_fault_of_ours_fails_what_is_under_way_by_name_and_the_endpoint_goes_on(
    world: World,
) -> None:
    sender, receiver = world.pair()
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
    receiver.tell(cast("KvCommand", object()))
    assert "KV endpoint: AttributeError" in receiver.wait(PeerLost)[0].reason
    assert receiver.wait(HandoffFailed, handoff("a"))[0].kind == "internal_error"
    sender.wait(PeerLost)
    connect(sender, receiver)
    move(sender, receiver, "again")
