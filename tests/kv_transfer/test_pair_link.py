"""The link whose payloads go through a process group: its order of words, and calls that hang."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Lock

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import Store, TCPStore

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
from kv_transfer.transports.pair_link import MAX_PARCEL_BYTES, MAX_PARCELS, PairLink
from kv_transfer.transports.process_group import gloo_link
from kv_transfer.transports.transport import (
    Arrived,
    Closed,
    LinkSetting,
    Opened,
    Stream,
    StreamEvents,
    Turns,
)
from pdserve.core.errors import LinkDownError, TransferError, TransferTimeoutError
from tests.fakes import FakeClock

SMALL = np.arange(64, dtype=np.uint8)
PAYLOAD = np.arange(8 << 20, dtype=np.uint8)  # more than sockets take before someone reads


class End:
    """One end of the link, its queue pumped by the test."""

    def __init__(self, clock: FakeClock, turns: Turns, timeout_s: float) -> None:
        self.events: StreamEvents = SimpleQueue()
        self.setting = LinkSetting(
            events=self.events,
            clock=clock,
            host="127.0.0.1",
            timeout_s=timeout_s,
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


class LateGroup:
    """As NCCL's: made at once, but what is first done waits for the other side, without end."""

    def __init__(self, store: Store, rank: int, setting: LinkSetting) -> None:
        self._store = store
        self._rank = rank
        self._is_connected = False
        self._num_moved = 0

    def connect(self, other: int, *, sends: bool) -> None:
        self._store.set(f"connects {self._rank}", "now")
        while not self._store.check([f"connects {other}"]):
            time.sleep(0.01)
        self._is_connected = True

    def send(self, data: torch.Tensor, other: int) -> "LateGroup":
        assert self._is_connected
        self._store.set(f"moved {self._num_moved}", data.numpy().tobytes().decode("latin-1"))
        self._num_moved += 1
        return self

    def receive(self, data: torch.Tensor, other: int) -> "LateGroup":
        assert self._is_connected
        came = self._store.get(f"moved {self._num_moved}").decode().encode("latin-1")
        data.copy_(torch.frombuffer(bytearray(came), dtype=torch.uint8))
        self._num_moved += 1
        return self

    def wait(self) -> None:
        """It is there already."""

    def abort(self) -> None:
        """What waits for the other side goes on waiting."""


def late_link(stream: Stream, setting: LinkSetting) -> PairLink:
    return PairLink(stream, setting, LateGroup, torch.device("cpu"))


@contextmanager
def linked(
    clock: FakeClock,
    sending: Turns,
    receiving: Turns,
    make_link: Callable[[Stream, LinkSetting], PairLink] = gloo_link,
    timeout_s: float = 10.0,
) -> Iterator[tuple[End, End]]:
    """A link between two ranks; ends with the same turns are the same rank's."""
    network = LoopbackNetwork()
    dialled, accepted = End(clock, sending, timeout_s), End(clock, receiving, timeout_s)
    wires = network.open(dialled.events), network.open(accepted.events)
    stream = wires[0].connect(wires[1].address)
    opened = accepted.events.get()
    assert isinstance(opened, Opened)
    dialled.link = make_link(stream, dialled.setting)
    accepted.link = make_link(opened.stream, accepted.setting)
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


def meet(sender: End, receiver: End, payload: Bytes = PAYLOAD) -> None:
    """The first payload makes the group, and arrives: parcel 0."""
    sender.link.send(Message(Warm(), payload))
    while (message := receiver.take()) is None:  # offer, met, announced
        pass
    assert message.body == Warm()
    assert holds(message, payload)
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
    for first in (0, MAX_PARCELS):  # no more are announced at once
        sent = [np.full(1 << 20, first + number, np.uint8) for number in range(MAX_PARCELS)]
        for payload in sent:
            sender.link.send(Message(Heartbeat(), payload))
        came: list[Message] = []
        while len(came) < MAX_PARCELS:
            if (message := receiver.take()) is not None:
                came.append(message)
        assert all(holds(message, payload) for message, payload in zip(came, sent, strict=True))


def test_the_next_word_is_said_before_the_payload_before_it_has_gone() -> None:
    released, turns = Event(), some_turns()

    class HeldGroup(LateGroup):
        def wait(self) -> None:
            if self._num_moved > 1:  # after the one that makes the link
                released.wait(20)

    def held_link(stream: Stream, setting: LinkSetting) -> PairLink:
        return PairLink(stream, setting, HeldGroup, torch.device("cpu"))

    with linked(FakeClock(), turns, some_turns(), held_link) as (sender, receiver):
        meet(sender, receiver, SMALL)
        with turns.sending:
            for _ in range(3):
                sender.link.send(Message(Heartbeat(), SMALL))
        for parcel in (1, 2, 3):
            event = receiver.events.get(timeout=20)
            assert isinstance(event, Arrived)
            assert event.message.announced == Announced(parcel, len(SMALL))
        released.set()


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


def test_a_peer_that_never_makes_its_group_keeps_no_other_link_of_the_rank_waiting() -> None:
    clock, one_rank = FakeClock(), some_turns()
    with (
        linked(clock, one_rank, some_turns(), late_link, timeout_s=0.5) as (to_dead, dead),
        linked(clock, one_rank, some_turns(), late_link) as (to_living, living),
    ):
        to_dead.link.send(Message(Warm(), SMALL))
        offer = dead.events.get(timeout=20)
        assert isinstance(offer, Arrived)
        assert isinstance(offer.message.body, PairOffer)  # and it dies before it has taken that up
        to_living.link.send(Message(Warm(), SMALL))
        while (message := living.take()) is None:
            pass
        assert holds(message, SMALL)
        while not isinstance(event := to_dead.events.get(timeout=20), Closed):
            pass
        assert isinstance(event.error, TransferError)
        for thread in list(to_dead.setting.threads):
            thread.join(5)
            assert not thread.is_alive()


def test_a_link_that_is_closed_while_the_other_side_makes_its_group_connects_to_nobody() -> None:
    connected = Event()

    class DeafGroup(LateGroup):
        """As NCCL's: an abort ends what has begun, and nothing that begins later."""

        def connect(self, other: int, *, sends: bool) -> None:
            connected.set()
            super().connect(other, sends=sends)

    def deaf_link(stream: Stream, setting: LinkSetting) -> PairLink:
        return PairLink(stream, setting, DeafGroup, torch.device("cpu"))

    with linked(FakeClock(), some_turns(), some_turns(), deaf_link) as (sender, receiver):
        sender.link.send(Message(Warm(), SMALL))
        came = receiver.events.get(timeout=20)
        assert isinstance(came, Arrived)
        assert isinstance(came.message.body, PairOffer)
        offer = came.message.body
        store = TCPStore(offer.host, offer.port, 2, wait_for_workers=False)
        store.wait(["group 0"])
        sender.link.close()
        store.set("group 1", "made")  # and then it is gone
        for thread in list(sender.setting.threads):
            thread.join(5)
            assert not thread.is_alive()
        assert not connected.is_set()


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
