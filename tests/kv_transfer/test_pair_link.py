"""The link whose payloads go through a process group: its order of words, and calls that hang."""

import time
from collections.abc import Iterator
from threading import Event

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
from kv_transfer.transports.pair import HOST
from kv_transfer.transports.pair_link import MAX_PARCEL_BYTES, MAX_PARCELS, PairLink
from kv_transfer.transports.transport import (
    Arrived,
    Closed,
    LinkSetting,
    Stream,
)
from pdserve.core.errors import LinkDownError, TransferError, TransferTimeoutError
from tests.fakes import FakeClock
from tests.kv_transfer.pair_ends import (
    PAYLOAD,
    SMALL,
    End,
    LateGroup,
    holds,
    late_link,
    linked,
    meet,
    some_turns,
)


@pytest.fixture
def ends() -> Iterator[tuple[FakeClock, End, End]]:
    clock = FakeClock()
    with linked(clock, some_turns(), some_turns()) as (dialled, accepted):
        yield clock, dialled, accepted


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


def test_a_receive_is_overdue_before_those_who_wait_to_send_to_the_same_rank() -> None:
    clock, one_rank = FakeClock(), some_turns()
    with (
        linked(clock, some_turns(), one_rank, late_link) as (stopped, receiver),
        linked(clock, some_turns(), one_rank, late_link) as (sender, waiting),
    ):
        meet(stopped, receiver, SMALL)
        meet(sender, waiting, SMALL)
        receiver.hear(Warm(), Announced(1, len(SMALL)))  # and nothing comes
        pair = receiver.link._pair
        while not pair._jobs.empty() or pair._busy_since_s is None:
            time.sleep(0.001)
        clock.advance(5.5)
        receiver.link.check(clock.now_s())
        waiting.hear(Warm(), Announced(1, len(SMALL)))
        while not one_rank.receiving.is_awaited:
            time.sleep(0.001)
        with pytest.raises(TransferTimeoutError, match=r"was busy for more than 5\.0 s"):
            receiver.link.check(clock.now_s())
        stopped.link.close()  # its store ends, and with it what waits there


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


def test_who_has_said_that_its_group_is_made_connects_though_its_link_is_closed() -> None:
    """Else the other side, which may have begun to connect, would wait without end."""
    made, connected = Event(), Event()

    class SlowGroup(LateGroup):
        def __init__(self, store: Store, rank: int, setting: LinkSetting) -> None:
            if rank == HOST:
                made.wait(20)
            super().__init__(store, rank, setting)

        def connect(self, other: int, *, sends: bool) -> None:
            super().connect(other, sends=sends)
            if other == HOST:
                connected.set()

    def slow_link(stream: Stream, setting: LinkSetting) -> PairLink:
        return PairLink(stream, setting, SlowGroup, torch.device("cpu"))

    with linked(FakeClock(), some_turns(), some_turns(), slow_link) as (sender, receiver):
        sender.link.send(Message(Warm(), SMALL))
        came = receiver.events.get(timeout=20)
        assert isinstance(came, Arrived)
        assert isinstance(came.message.body, PairOffer)
        receiver.link.on(came)
        offer = came.message.body
        TCPStore(offer.host, offer.port, 2, wait_for_workers=False).wait(["group 1"])
        receiver.link.close()
        made.set()
        for thread in list(receiver.setting.threads):
            thread.join(5)
            assert not thread.is_alive()
        assert connected.is_set()
        sender.link.close()
        for thread in list(sender.setting.threads | receiver.setting.threads):
            thread.join(5)
            assert not thread.is_alive()


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
