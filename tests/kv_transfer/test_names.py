"""A node that becomes another incarnation with the same ranks: its role may be another, too."""

from dataclasses import replace

from kv_transfer.commands import (
    AcceptPeer,
    ConnectPeer,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    NameTaken,
    PeerConnected,
    PeerLost,
    TakeName,
)
from tests.kv_transfer.nodes import LAYOUT, Node, World, blocks, connect, handoff, prompt_kv

OURS, THEIRS = blocks(1, 2, 3), blocks(7, 8, 9)


def take_name(node: Node, name: str) -> None:
    node.tell(TakeName(peer_id=name))
    assert node.wait(NameTaken) == [NameTaken(peer_id=name)] * len(node.ranks)
    node.peer_id = name


def move(sender: Node, receiver: Node, seed: int) -> None:
    """A handoff of 40 tokens that must arrive; all have the same name."""
    kv = prompt_kv(sender.layout, 40, seed)
    sender.write(kv, OURS)
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
    sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
    receiver.wait(HandoffReceived, handoff("a"))
    sender.wait(HandoffSent, handoff("a"))
    assert receiver.holds(kv, THEIRS)


def test_two_nodes_change_roles_and_kv_goes_the_other_way(world: World) -> None:
    one, two = world.pair(receiver=replace(LAYOUT, tp_size=2))
    move(one, two, seed=1)
    take_name(one, "p2")
    assert two.wait(PeerLost)[0].peer_id == "p"
    take_name(two, "d2")
    connect(two, one)
    move(two, one, seed=2)
    assert one.leftover() == two.leftover() == []


def test_a_third_node_that_knows_the_old_name_is_told_that_it_is_another_now(world: World) -> None:
    one, third = world.node("p"), world.node("d")
    old = one.peer
    take_name(one, "p2")
    one.tell(AcceptPeer(peer=third.peer))
    third.tell(ConnectPeer(peer=old))
    assert "peer_id differs: here 'p', there 'p2'" in third.wait(PeerLost)[0].reason


def test_nothing_of_the_old_incarnation_is_told_after_the_new_name(world: World) -> None:
    """Neither what was half done, nor what the other side still says of it."""
    sender, receiver = world.pair()
    receiver.expect(handoff("half"), "p", 40, THEIRS)
    sender.push(handoff("half"), "d", range(16), OURS, last=False)
    take_name(receiver, "d2")
    assert [type(event) for event in receiver.leftover()] == [HandoffFailed]
    sender.wait(PeerLost)
    receiver.tell(AcceptPeer(peer=sender.peer))
    sender.tell(ConnectPeer(peer=receiver.peer))
    sender.wait(PeerConnected)
    receiver.wait(PeerConnected)
    kv = prompt_kv(LAYOUT, 40, 3)
    sender.write(kv, OURS)
    sender.push(handoff("b"), "d2", range(40), OURS)
    receiver.expect(handoff("b"), "p", 40, THEIRS)
    receiver.wait(HandoffReceived, handoff("b"))
    assert receiver.holds(kv, THEIRS)
