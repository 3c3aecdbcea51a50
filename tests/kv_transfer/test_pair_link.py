"""The link whose payloads go through a process group: its order of words, and calls that hang."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock

import numpy as np
import pytest
import torch

from kv_transfer.messages import (
    Announced,
    Body,
    Heartbeat,
    Message,
    PairOffer,
    Warm,
)
from kv_transfer.payload import Bytes
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.pair import MAX_IN_TURN
from kv_transfer.transports.pair_link import MAX_PARCEL_BYTES, MAX_PARCELS, PairLink
from kv_transfer.transports.process_group import gloo_link
from kv_transfer.transports.transport import (
    Arrived,
    Closed,
    LinkSetting,
    Opened,
    StreamEvents,
    Turns,
)
from pdserve.core.errors import LinkDownError, TransferTimeoutError
from tests.fakes import FakeClock

PAYLOAD = np.arange(8 << 20, dtype=np.uint8)  # more than sockets take before someone reads


class End:
    """One end of the link, its queue pumped by the test."""

    def __init__(self, clock: FakeClock, turns: Turns) -> None:
        self.events: StreamEvents = SimpleQueue()
        self.setting = LinkSetting(
            events=self.events,
            clock=clock,
            host="127.0.0.1",
            timeout_s=10.0,
            kv=torch.empty(0),
            turns=turns,
        )
        self.link: PairLink

    def take(self) -> Message | None:
        """The next event."""
        event = self.events.get(timeout=20)
        assert not isinstance(event, Closed | Opened), f"{event}"
        return self.link.on(event)

    def hear(self, body: Body, announced: Announced | None = None) -> Message | None:
        """A message that the other side did not send."""
        stream = self.link._stream
        return self.link.on(Arrived(stream, Message(body, announced=announced)))


@pytest.fixture
def ends() -> Iterator[tuple[FakeClock, End, End]]:
    clock = FakeClock()
    with linked(clock, some_turns(), some_turns()) as (dialled, accepted):
        yield clock, dialled, accepted


@contextmanager
def linked(clock: FakeClock, sending: Turns, receiving: Turns) -> Iterator[tuple[End, End]]:
    """A link between two ranks; ends with the same turns are the same rank's."""
    network = LoopbackNetwork()
    dialled, accepted = End(clock, sending), End(clock, receiving)
    wires = network.open(dialled.events), network.open(accepted.events)
    stream = wires[0].connect(wires[1].address)
    opened = accepted.events.get()
    assert isinstance(opened, Opened)
    dialled.link = gloo_link(stream, dialled.setting)
    accepted.link = gloo_link(opened.stream, accepted.setting)
    try:
        yield dialled, accepted
    finally:
        dialled.link.close()
        accepted.link.close()


def some_turns() -> Turns:
    return Turns(Lock(), Lock())


def holds(message: Message, payload: Bytes) -> bool:
    assert isinstance(message.payload, np.ndarray)
    return bool((message.payload == payload).all())


def meet(sender: End, receiver: End) -> None:
    """The first payload makes the group, and arrives: parcel 0."""
    sender.link.send(Message(Warm(), PAYLOAD))
    while (message := receiver.take()) is None:  # offer, met, announced
        pass
    assert message.body == Warm()
    assert holds(message, PAYLOAD)
    assert sender.take() is None  # met


def test_payloads_go_both_ways_in_the_order_of_their_messages(
    ends: tuple[FakeClock, End, End],
) -> None:
    _, first, second = ends
    meet(first, second)
    second.link.send(Message(Heartbeat()))
    bare = first.take()
    assert bare is not None
    assert bare.payload is None
    second.link.send(Message(Heartbeat(), PAYLOAD[::-1].copy()))
    second.link.send(Message(Heartbeat(), PAYLOAD))
    came: list[Message] = []
    while len(came) < 2:
        if (message := first.take()) is not None:
            came.append(message)
    assert holds(came[0], PAYLOAD[::-1])
    assert holds(came[1], PAYLOAD)


def test_many_payloads_follow_each_other_and_come_in_their_order(
    ends: tuple[FakeClock, End, End],
) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    for number in range(MAX_IN_TURN + 3):
        sender.link.send(Message(Heartbeat(), np.full(1 << 20, number, np.uint8)))
    came: list[Message] = []
    while len(came) < MAX_IN_TURN + 3:
        if (message := receiver.take()) is not None:
            came.append(message)
    assert all(
        holds(message, np.full(1 << 20, number, np.uint8)) for number, message in enumerate(came)
    )


def test_the_next_word_is_said_before_the_payload_before_it_has_gone(
    ends: tuple[FakeClock, End, End],
) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    for _ in range(3):
        sender.link.send(Message(Heartbeat(), PAYLOAD))
    for parcel in (1, 2, 3):  # nothing is received meanwhile
        event = receiver.events.get(timeout=20)
        assert isinstance(event, Arrived)
        assert event.message.announced == Announced(parcel, len(PAYLOAD))


def test_a_send_that_nobody_receives_is_overdue_and_can_be_aborted(
    ends: tuple[FakeClock, End, End],
) -> None:
    clock, sender, receiver = ends
    meet(sender, receiver)
    sender.link.send(Message(Warm(), PAYLOAD))
    word = receiver.events.get(timeout=20)  # and this is lost
    assert isinstance(word, Arrived)
    assert word.message.announced == Announced(1, len(PAYLOAD))
    sender.link.check(clock.now_s())
    clock.advance(10.5)
    with pytest.raises(TransferTimeoutError, match="a process group was busy for more than 10"):
        sender.link.check(clock.now_s())
    sender.link.close()
    receiver.link.close()
    for thread in list(sender.setting.threads | receiver.setting.threads):
        thread.join(5)
        assert not thread.is_alive(), "a blocked call did not end when the other side let go"


def test_a_receive_whose_sender_closes_ends_by_name(ends: tuple[FakeClock, End, End]) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    receiver.hear(Warm(), Announced(1, 5))  # forged: nothing is being sent
    sender.link.close()
    while not isinstance(event := receiver.events.get(timeout=20), Closed):
        pass
    assert isinstance(event.error, LinkDownError)


def test_a_sender_that_stops_in_a_frame_keeps_no_other_link_waiting() -> None:
    clock = FakeClock()
    p2, d1 = some_turns(), some_turns()
    with (
        linked(clock, some_turns(), d1) as (stopped, waiting),
        linked(clock, p2, d1) as (to_d1, at_d1),
        linked(clock, p2, some_turns()) as (to_d2, at_d2),
    ):
        for sender, receiver in ((stopped, waiting), (to_d1, at_d1), (to_d2, at_d2)):
            meet(sender, receiver)
        waiting.hear(Warm(), Announced(1, len(PAYLOAD)))  # and nothing comes
        for sender in (to_d1, to_d2):
            sender.link.send(Message(Warm(), PAYLOAD))
        for receiver in (at_d2, at_d1):
            while (message := receiver.take()) is None:
                pass
            assert holds(message, PAYLOAD)


@pytest.mark.parametrize(
    ("body", "announced", "problem"),
    [
        (Warm(), Announced(1, 0), "parcel 1 of 0 bytes"),
        (Warm(), Announced(1, MAX_PARCEL_BYTES + 1), "parcel 1 of"),
    ],
)
def test_words_out_of_order_end_the_link(
    ends: tuple[FakeClock, End, End], body: Body, announced: Announced | None, problem: str
) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    with pytest.raises(LinkDownError, match=problem):
        receiver.hear(body, announced)


def test_a_payload_before_the_group_is_offered_ends_the_link(
    ends: tuple[FakeClock, End, End],
) -> None:
    _, sender, receiver = ends
    with pytest.raises(LinkDownError, match="before the process group is made"):
        receiver.hear(Warm(), Announced(0, 5))
    with pytest.raises(LinkDownError, match="the wrong side"):
        sender.hear(PairOffer("127.0.0.1", 1))


def test_a_payload_inside_a_message_has_no_place_there(ends: tuple[FakeClock, End, End]) -> None:
    _, _, accepted = ends
    stream = accepted.link._stream
    with pytest.raises(LinkDownError, match="a payload inside a message"):
        accepted.link.on(Arrived(stream, Message(Warm(), PAYLOAD)))


def test_a_parcel_is_announced_once(ends: tuple[FakeClock, End, End]) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    receiver.hear(Warm(), Announced(1, 5))
    with pytest.raises(LinkDownError, match="parcel 1 of 5 bytes"):
        receiver.hear(Warm(), Announced(1, 5))


def test_no_more_is_announced_than_there_is_room_for(ends: tuple[FakeClock, End, End]) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    for parcel in range(1, MAX_PARCELS + 1):
        receiver.hear(Warm(), Announced(parcel, 5))
    with pytest.raises(LinkDownError, match="parcel 99 of 5 bytes"):
        receiver.hear(Warm(), Announced(99, 5))


def test_one_meeting_is_offered(ends: tuple[FakeClock, End, End]) -> None:
    _, sender, receiver = ends
    meet(sender, receiver)
    with pytest.raises(LinkDownError, match="the wrong side"):
        receiver.hear(PairOffer("127.0.0.1", 1))
