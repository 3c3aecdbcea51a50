"""Frames that are damaged, forged or nonsense: refused by name, and not one byte is written."""

from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.commands import (
    AcceptPeer,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    Peer,
    PeerConnected,
    PeerLost,
)
from kv_transfer.local_rank import LINK_VERSION
from kv_transfer.messages import (
    Body,
    Delivered,
    Frame,
    Heartbeat,
    Hello,
    Message,
    PairOffer,
    Rejected,
    Warm,
    checksum,
)
from kv_transfer.payload import Bytes
from kv_transfer.reshard import cell_bytes
from kv_transfer.transports.transport import Arrived, Closed, Stream, StreamEvents, Wire
from pdserve.core.request import HandoffId
from tests.fuzzing import inputs
from tests.kv_transfer.nodes import (
    LAYOUT,
    Node,
    World,
    blocks,
    connect,
    handoff,
    layout,
    open_world,
    prompt_kv,
)
from tests.kv_transfer.tampering import Send, tampered

NUM_TOKENS = 60  # three pieces and a part of the fourth
THEIRS = blocks(20, 21, 22, 23)
EVERY_BLOCK = blocks(*range(64))
CELL = cell_bytes(LAYOUT, LAYOUT.block_size)


class Damage:
    """Changes one bit of every frame while it is switched on."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, send: Send, message: Message) -> None:
        if self.is_on and isinstance(message.body, Frame):
            message = self.damaged(message, message.body)
        send(message)

    def damaged(self, message: Message, frame: Frame) -> Message:
        if isinstance(message.payload, np.ndarray):
            payload = message.payload.copy()
            payload[len(payload) // 2] ^= 1
            return Message(frame, payload)
        assert frame.checksum is not None  # gloo: the payload goes another way
        changed = Frame(
            seq=frame.seq,
            handoff=frame.handoff,
            pieces=frame.pieces,
            heads=frame.heads,
            checksum=frame.checksum ^ 1,
        )
        return Message(changed, message.payload, message.announced)


@pytest.mark.parametrize("world", ["loopback", "grpc", "gloo"], indirect=True)
def test_a_damaged_frame_fails_its_handoff_by_name_on_both_sides(world: World) -> None:
    damage = Damage()
    sender = world.node("p", layout(tp_size=2), open_wire=tampered(world.open_wire, damage))
    receiver = world.node("d")
    connect(sender, receiver)
    damage.is_on = True
    kv = prompt_kv(sender.layout, NUM_TOKENS, 1)
    sender.write(kv, blocks(1, 2, 3, 4))
    receiver.expect(handoff("a"), sender.peer_id, NUM_TOKENS, THEIRS)
    sender.push(handoff("a"), receiver.peer_id, range(NUM_TOKENS), blocks(1, 2, 3, 4))
    kinds = {event.kind for event in sender.wait(HandoffFailed, handoff("a"))}
    assert receiver.wait(HandoffFailed, handoff("a"))[0].kind == "checksum_error"
    assert "checksum_error" in kinds
    assert kinds <= {"checksum_error", "transfer_error"}  # other ranks learn that it has failed
    assert receiver.is_untouched(THEIRS)
    damage.is_on = False
    receiver.expect(handoff("b"), sender.peer_id, NUM_TOKENS, THEIRS)
    sender.push(handoff("b"), receiver.peer_id, range(NUM_TOKENS), blocks(1, 2, 3, 4))
    receiver.wait(HandoffReceived, handoff("b"))
    sender.wait(HandoffSent, handoff("b"))
    assert receiver.holds(kv, THEIRS)


class Forger:
    """A sender rank made by hand, with a link that is up; it may send anything."""

    def __init__(self, world: World, receiver: Node, peer_id: str = "p") -> None:
        self.events: StreamEvents = SimpleQueue()
        self.wire: Wire = world.open_wire(self.events)
        self.peer_id = peer_id
        peer = Peer(
            peer_id=peer_id,
            layout=LAYOUT,
            transport=world.transport,
            addresses=(self.wire.address,),
        )
        receiver.tell(AcceptPeer(peer=peer))
        self.stream: Stream = self.wire.connect(receiver.endpoints[0].address)
        self.say(
            Hello(
                version=LINK_VERSION,
                peer_id=peer_id,
                rank=0,
                layout=LAYOUT,
                transport=world.transport,
            )
        )
        assert isinstance(self.answer(), Hello)
        self.say(Warm(), bytes(100))
        assert isinstance(self.answer(), Warm)
        self.say(Heartbeat())
        receiver.wait(PeerConnected)

    def say(self, body: Body, payload: bytes | None = None) -> None:
        data = None if payload is None else np.frombuffer(payload, np.uint8)
        self.stream.send(Message(body, data))

    def frame(
        self,
        name: HandoffId,
        pieces: range,
        heads: range,
        payload: bytes | None,
        *,
        seq: int = 0,
        damage: int = 0,
    ) -> None:
        data: Bytes = np.frombuffer(payload or b"", np.uint8)
        right = checksum(name, pieces, heads, data)
        assert right is not None
        body = Frame(seq=seq, handoff=name, pieces=pieces, heads=heads, checksum=right ^ damage)
        self.say(body, payload)

    def answer(self) -> Body:
        event = self.events.get(timeout=10)
        assert isinstance(event, Arrived), f"{event}"
        return event.message.body

    def close(self) -> None:
        self.stream.close()
        self.wire.close()


@pytest.fixture(params=["loopback", "grpc"])
def forged(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Forger]]:
    with open_world(request.param) as world:
        receiver = world.node("d")
        forger = Forger(world, receiver)
        yield receiver, forger
        forger.close()


def expect(receiver: Node, forger: Forger, name: str = "a") -> None:
    expected = ExpectHandoff(
        handoff=handoff(name),
        peer_id=forger.peer_id,
        start=0,
        num_tokens=NUM_TOKENS,
        blocks=THEIRS,
    )
    receiver.tell(expected)


BOTH = range(2)


@pytest.mark.parametrize(
    ("pieces", "heads", "num_bytes", "problem"),
    [
        (range(4, 5), BOTH, 2 * CELL, "but pieces range(0, 4) of 2 heads are expected"),
        (range(3, 5), BOTH, 4 * CELL, "but pieces range(0, 4) of 2 heads are expected"),
        (range(0), BOTH, 0, "but pieces range(0, 4) of 2 heads are expected"),
        (range(1), range(2, 3), CELL, "but pieces range(0, 4) of 2 heads are expected"),
        (range(1), range(1, 3), 2 * CELL, "but pieces range(0, 4) of 2 heads are expected"),
        (range(1), BOTH, 2 * CELL - 1, f"frame of {2 * CELL - 1} bytes where {2 * CELL}"),
        (range(1), BOTH, 4 * CELL, f"frame of {4 * CELL} bytes where {2 * CELL}"),
        (range(2**31, 2**31 + 1), BOTH, 2 * CELL, "but pieces range(0, 4) of 2 heads are expected"),
    ],
)
def test_a_frame_that_does_not_fit_what_is_expected_fails_the_handoff_and_writes_nothing(
    forged: tuple[Node, Forger], pieces: range, heads: range, num_bytes: int, problem: str
) -> None:
    receiver, forger = forged
    expect(receiver, forger)
    forger.frame(handoff("a"), pieces, heads, b"\1" * num_bytes, seq=7)
    answer = forger.answer()
    assert isinstance(answer, Rejected)
    assert (answer.seq, answer.kind) == (7, "transfer_error")
    assert problem in answer.message
    assert receiver.wait(HandoffFailed, handoff("a"))[0].message == answer.message
    assert receiver.is_untouched(EVERY_BLOCK)


def test_a_frame_without_a_payload_is_refused(forged: tuple[Node, Forger]) -> None:
    receiver, forger = forged
    expect(receiver, forger)
    forger.frame(handoff("a"), range(1), BOTH, None)
    assert isinstance(forger.answer(), Rejected)
    receiver.wait(HandoffFailed, handoff("a"))


def test_a_frame_that_comes_twice_fails_the_handoff(forged: tuple[Node, Forger]) -> None:
    receiver, forger = forged
    expect(receiver, forger)
    forger.frame(handoff("a"), range(1), BOTH, b"\1" * 2 * CELL, seq=0)
    assert forger.answer() == Delivered(0)
    forger.frame(handoff("a"), range(1), range(1, 2), b"\2" * CELL, seq=1)
    assert "came before" in receiver.wait(HandoffFailed, handoff("a"))[0].message
    assert isinstance(forger.answer(), Rejected)
    assert bool((receiver.caches[0][20].view(-1).view(torch.uint8) == 1).all())


def test_a_frame_after_the_end_of_its_handoff_is_refused(forged: tuple[Node, Forger]) -> None:
    receiver, forger = forged
    expect(receiver, forger)
    forger.frame(handoff("a"), range(4), BOTH, b"\1" * 8 * CELL)
    assert forger.answer() == Delivered(0)
    receiver.wait(HandoffReceived, handoff("a"))
    forger.frame(handoff("a"), range(1), BOTH, b"\2" * 2 * CELL, seq=1)
    answer = forger.answer()
    assert isinstance(answer, Rejected)
    assert answer.message == "the handoff was received"
    assert not receiver.leftover()


def test_a_frame_for_another_peers_handoff_is_refused_and_does_it_no_harm() -> None:
    with open_world("loopback") as world:
        receiver = world.node("d")
        honest, other = Forger(world, receiver, "p"), Forger(world, receiver, "q")
        expect(receiver, honest)
        other.frame(handoff("a"), range(1), BOTH, b"\2" * 2 * CELL)
        answer = other.answer()
        assert isinstance(answer, Rejected)
        assert answer.message == "the handoff is expected from another node"
        honest.frame(handoff("a"), range(4), BOTH, b"\1" * 8 * CELL)
        receiver.wait(HandoffReceived, handoff("a"))
        honest.close()
        other.close()


def test_more_unexpected_frames_than_an_honest_sender_has_are_refused(
    forged: tuple[Node, Forger],
) -> None:
    _, forger = forged
    for seq in range(9):
        forger.frame(handoff(f"unknown-{seq}"), range(1), BOTH, b"\1" * 2 * CELL, seq=seq)
    answer = forger.answer()
    assert isinstance(answer, Rejected)
    assert answer.seq == 8
    assert "too many frames" in answer.message


@pytest.mark.parametrize("body", [PairOffer("127.0.0.1", 1), Warm(), Delivered(0)])
def test_a_message_that_has_no_place_there_ends_the_link_by_name(
    forged: tuple[Node, Forger], body: Body
) -> None:
    receiver, forger = forged
    expect(receiver, forger)
    forger.say(body)
    assert f"unexpected {type(body).__name__}" in receiver.wait(PeerLost)[0].reason
    assert receiver.wait(HandoffFailed, handoff("a"))[0].kind == "link_down_error"
    event = forger.events.get(timeout=10)
    assert isinstance(event, Closed)


@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.integers(0, 5),
            st.integers(0, 4),
            st.integers(0, 3),
            st.integers(0, 3),
            st.sampled_from([0, 0, 0, 1]),
        ),
        max_size=12,
    )
)
@inputs(40)
@pytest.mark.fuzz
def test_whatever_frames_come_only_the_blocks_of_the_handoff_are_written(
    frames: list[tuple[str, int, int, int, int, int]],
) -> None:
    with open_world("loopback") as world:
        receiver = world.node("d")
        forger = Forger(world, receiver)
        expect(receiver, forger)
        for seq, (name, first, count, head, num_heads, damage) in enumerate(frames):
            pieces = range(first, first + count)
            heads = range(head, head + num_heads)
            payload = b"\1" * (len(pieces) * len(heads) * CELL)
            forger.frame(handoff(name), pieces, heads, payload, seq=seq, damage=damage)
        receiver.close()
        assert receiver.is_untouched([b for b in EVERY_BLOCK if b not in THEIRS])
        forger.close()
