"""Cancel at each stage, on either side: drained at once, no late byte in a reused block."""

import random

import pytest

from kv_transfer.commands import (
    CancelReceive,
    CancelSend,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    ReceiveDrained,
    SendDrained,
)
from kv_transfer.messages import Body, Delivered, Frame
from pdserve.core.kv_layout import BlockId
from tests.kv_transfer.nodes import Node, World, blocks, connect, handoff, layout, prompt_kv
from tests.kv_transfer.tampering import Gate, tampered

NUM_TOKENS = 160
PART = 152  # tokens of a first push; more frames than a window, where they are small
OURS, THEIRS = blocks(*range(10, 20)), blocks(*range(30, 50))


def gated_pair(world: World, gate_at_sender: Gate, gate_at_receiver: Gate) -> tuple[Node, Node]:
    sender = world.node("p", layout(tp_size=2), open_wire=tampered(world.open_wire, gate_at_sender))
    receiver = world.node(
        "d", layout(block_size=8), open_wire=tampered(world.open_wire, gate_at_receiver)
    )
    connect(sender, receiver)
    return sender, receiver


def begin(sender: Node, receiver: Node, *, last: bool = True) -> None:
    receiver.expect(handoff("a"), sender.peer_id, NUM_TOKENS, THEIRS)
    sender.write(prompt_kv(sender.layout, NUM_TOKENS, 1), OURS)
    stop = NUM_TOKENS if last else PART
    sender.push(handoff("a"), receiver.peer_id, range(stop), OURS, last=last)


def reuse(sender: Node, receiver: Node, *, table: tuple[BlockId, ...] = THEIRS) -> None:
    """Another handoff into the same blocks must arrive whole, whatever comes late."""
    kv = prompt_kv(sender.layout, NUM_TOKENS, 2)
    receiver.expect(handoff("b"), sender.peer_id, NUM_TOKENS, table)
    sender.write(kv, OURS)
    sender.push(handoff("b"), receiver.peer_id, range(NUM_TOKENS), OURS)
    receiver.wait(HandoffReceived, handoff("b"))
    sender.wait(HandoffSent, handoff("b"))
    assert receiver.holds(kv, table)


@pytest.mark.parametrize("held", [Frame, Delivered])
def test_sender_cancels_while_frames_are_under_way(world: World, held: type[Body]) -> None:
    """Frames under way are delivered or answered later; nothing more is read for them. The end is
    not pushed: else all of it may have been received before the cancel.
    """
    gates = Gate(held), Gate(held)
    sender, receiver = gated_pair(world, *gates)
    for gate in gates:
        gate.shut()
    begin(sender, receiver, last=False)
    sender.tell(CancelSend(handoff=handoff("a")))
    sender.wait(SendDrained, handoff("a"))
    receiver.tell(CancelReceive(handoff=handoff("a")))
    receiver.wait(ReceiveDrained, handoff("a"))
    for gate in gates:
        gate.open()
    reuse(sender, receiver)
    assert not sender.leftover()
    assert not [e for e in receiver.leftover() if isinstance(e, HandoffReceived)]


def test_receiver_cancels_and_late_frames_are_dropped_by_name(world: World) -> None:
    at_sender = Gate(Frame)
    sender, receiver = gated_pair(world, at_sender, Gate(Frame))
    at_sender.shut()
    begin(sender, receiver)
    receiver.tell(CancelReceive(handoff=handoff("a")))
    receiver.wait(ReceiveDrained, handoff("a"))
    at_sender.open()
    for failed in sender.wait(HandoffFailed, handoff("a")):
        assert failed.kind == "transfer_error"
        assert failed.message == "the handoff was cancelled by the receiver's front"
    assert receiver.is_untouched(THEIRS)
    reuse(sender, receiver)


def test_cancel_before_anything_was_pushed_or_expected_drains_at_once(world: World) -> None:
    sender, receiver = world.pair()
    sender.tell(CancelSend(handoff=handoff("a")))
    receiver.tell(CancelReceive(handoff=handoff("a")))
    sender.wait(SendDrained, handoff("a"))
    receiver.wait(ReceiveDrained, handoff("a"))


def test_cancel_between_two_pushes(world: World) -> None:
    sender, receiver = gated_pair(world, Gate(Frame), Gate(Frame))
    begin(sender, receiver, last=False)
    sender.tell(CancelSend(handoff=handoff("a")))
    sender.wait(SendDrained, handoff("a"))
    sender.push(handoff("a"), receiver.peer_id, range(PART, NUM_TOKENS), OURS)  # crossed the cancel
    receiver.tell(CancelReceive(handoff=handoff("a")))
    receiver.wait(ReceiveDrained, handoff("a"))
    reuse(sender, receiver)
    assert not sender.leftover()


def test_cancel_after_the_end_drains_and_changes_nothing(world: World) -> None:
    sender, receiver = world.pair(layout(tp_size=2), layout(block_size=8))
    begin(sender, receiver)
    sender.wait(HandoffSent, handoff("a"))
    receiver.wait(HandoffReceived, handoff("a"))
    sender.tell(CancelSend(handoff=handoff("a")))
    receiver.tell(CancelReceive(handoff=handoff("a")))
    sender.wait(SendDrained, handoff("a"))
    receiver.wait(ReceiveDrained, handoff("a"))
    assert receiver.holds(prompt_kv(sender.layout, NUM_TOKENS, 1), THEIRS)


def test_frames_held_for_a_handoff_that_is_cancelled_instead_of_expected_are_rejected(
    world: World,
) -> None:
    sender, receiver = world.pair()
    sender.push(handoff("a"), receiver.peer_id, range(NUM_TOKENS), OURS)
    receiver.tell(CancelReceive(handoff=handoff("a")))
    receiver.wait(ReceiveDrained, handoff("a"))
    sender.wait(HandoffFailed, handoff("a"))
    receiver.expect(handoff("a"), sender.peer_id, NUM_TOKENS, THEIRS)
    assert "was cancelled" in receiver.wait(HandoffFailed, handoff("a"))[0].message
    assert receiver.is_untouched(THEIRS)


def test_data_that_come_after_their_blocks_were_given_to_another_handoff_are_dropped(
    world: World,
) -> None:
    """The old handoff's frames are let go only when the new one is already in the blocks."""
    at_sender = Gate(Frame)
    sender, receiver = gated_pair(world, at_sender, Gate(Frame))
    other = world.node("q", layout(tp_size=2))
    connect(other, receiver)
    at_sender.shut()
    begin(sender, receiver)
    receiver.tell(CancelReceive(handoff=handoff("a")))
    receiver.wait(ReceiveDrained, handoff("a"))
    kv = prompt_kv(other.layout, NUM_TOKENS, 3)
    receiver.expect(handoff("c"), other.peer_id, NUM_TOKENS, THEIRS)
    other.write(kv, OURS)
    other.push(handoff("c"), receiver.peer_id, range(NUM_TOKENS), OURS)
    receiver.wait(HandoffReceived, handoff("c"))
    assert at_sender.open() > 0
    sender.wait(HandoffFailed, handoff("a"))
    assert receiver.holds(kv, THEIRS)


def test_a_storm_of_cancels_never_harms_the_handoff_that_comes_next(world: World) -> None:
    """The same blocks again and again, given back the moment they are drained."""
    sender, receiver = world.pair(layout(tp_size=2), layout(block_size=8))
    moments = random.Random(3)
    for number in range(25):
        name, kv = handoff(str(number)), prompt_kv(sender.layout, NUM_TOKENS, number)
        receiver.expect(name, sender.peer_id, NUM_TOKENS, THEIRS)
        sender.write(kv, OURS)
        for start in range(0, NUM_TOKENS, 64):
            stop = min(start + 64, NUM_TOKENS)
            last = stop == NUM_TOKENS
            sender.push(name, receiver.peer_id, range(start, stop), OURS, last=last)
        if moments.random() < 0.3:
            sender.wait(HandoffSent, name)
        if moments.random() < 0.3:
            receiver.wait(HandoffReceived, name)
            assert receiver.holds(kv, THEIRS)
        sender.tell(CancelSend(handoff=name))
        receiver.tell(CancelReceive(handoff=name))
        sender.wait(SendDrained, name)
        receiver.wait(ReceiveDrained, name)
    reuse(sender, receiver)
