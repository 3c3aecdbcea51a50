"""Heartbeats and deadlines, with a clock that the test moves."""

from collections.abc import Iterator

import pytest

from kv_transfer.commands import (
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    KvEvent,
    PeerConnected,
    PeerLost,
    PushTokens,
)
from kv_transfer.transports.loopback import LoopbackNetwork
from tests.fakes import FakeClock
from tests.kv_transfer.breaking import Queued
from tests.kv_transfer.lending import in_place
from tests.kv_transfer.nodes import LAYOUT, blocks, handoff
from tests.kv_transfer.threadless import TIMEOUT_S, Rank, connected_pair, peer_of, settle

EXPECT = ExpectHandoff(
    handoff=handoff("a"), peer_id="p", start=0, num_tokens=40, blocks=blocks(4, 5, 6)
)
PUSH = PushTokens(
    handoff=handoff("a"), peer_id="d", start=0, stop=40, blocks=blocks(1, 2, 3), last=True
)


@pytest.fixture
def pair() -> Iterator[tuple[FakeClock, Rank, Rank]]:
    clock, sender, receiver = connected_pair(LAYOUT, LAYOUT)
    yield clock, sender, receiver
    sender.close()
    receiver.close()


def pass_time(clock: FakeClock, duration_s: float, *ranks: Rank) -> None:
    """Only these ranks are awake."""
    for _ in range(20):
        clock.advance(duration_s / 20)
        for rank in ranks:
            settle([rank])
            rank.tend()


def lost(events: list[KvEvent]) -> str:
    """Why the peer was lost; its handoffs failed with the same words."""
    reasons = {event.reason for event in events if isinstance(event, PeerLost)}
    reasons |= {event.message for event in events if isinstance(event, HandoffFailed)}
    assert len(reasons) == 1
    return reasons.pop()


def test_idle_links_stay_up_for_hours(pair: tuple[FakeClock, Rank, Rank]) -> None:
    clock, sender, receiver = pair
    for _ in range(2000):
        pass_time(clock, TIMEOUT_S, sender, receiver)
    assert not sender.said()
    assert not receiver.said()
    receiver.receiver.expect(EXPECT)
    sender.sender.push(PUSH)
    settle([sender, receiver])
    assert [type(event) for event in sender.said()] == [HandoffSent]
    assert [type(event) for event in receiver.said()] == [HandoffReceived]


def test_a_silent_receiver_is_lost(pair: tuple[FakeClock, Rank, Rank]) -> None:
    clock, sender, _ = pair
    pass_time(clock, TIMEOUT_S * 1.1, sender)
    assert lost(sender.said()) == "the receiver was silent for 10.0 s"


def test_a_silent_sender_is_lost_and_its_handoffs_fail(
    pair: tuple[FakeClock, Rank, Rank],
) -> None:
    clock, _, receiver = pair
    receiver.receiver.expect(EXPECT)
    pass_time(clock, TIMEOUT_S * 1.1, receiver)
    said = receiver.said()
    assert lost(said) == "the sender was silent for 10.0 s"
    assert [event.kind for event in said if isinstance(event, HandoffFailed)] == [
        "transfer_timeout_error"
    ]


def test_a_frame_that_is_not_delivered_in_time_fails_the_peer(
    pair: tuple[FakeClock, Rank, Rank],
) -> None:
    clock, sender, receiver = pair
    receiver.receiver.expect(EXPECT)
    sender.sender.push(PUSH)
    assert sender.sender.send_next()
    receiver.inbox.get()  # and there it is forgotten
    pass_time(clock, TIMEOUT_S * 1.1, sender, receiver)
    assert lost(sender.said()) == "a frame was not delivered within 10.0 s"


def queued_pair() -> tuple[FakeClock, Rank, Rank, Queued]:
    """Connected; what the sender's link is to move waits from now on for the turn of another."""
    with in_place("loopback", "tests.kv_transfer.breaking:Queued"):
        clock, sender, receiver = connected_pair(LAYOUT, LAYOUT)
    (link,) = (outbound.link for outbound in sender.sender._links.values())
    assert isinstance(link, Queued)
    link.is_waiting = True
    return clock, sender, receiver, link


def test_a_frame_that_waits_for_the_turn_of_another_link_is_not_late() -> None:
    clock, sender, receiver, link = queued_pair()
    receiver.receiver.expect(EXPECT)
    sender.sender.push(PUSH)
    assert sender.sender.send_next()
    pass_time(clock, TIMEOUT_S * 2, sender, receiver)
    assert not sender.said()
    link.have_turn()
    pass_time(clock, TIMEOUT_S * 0.9, sender, receiver)
    assert [type(event) for event in sender.said()] == [HandoffSent]


def test_a_frame_is_late_when_it_has_had_its_turn_for_long() -> None:
    clock, sender, receiver, link = queued_pair()
    sender.sender.push(PUSH)
    assert sender.sender.send_next()
    pass_time(clock, TIMEOUT_S * 2, sender, receiver)
    link.is_waiting = False  # and what it sends is lost
    pass_time(clock, TIMEOUT_S * 1.1, sender, receiver)
    assert lost(sender.said()) == "a frame was not delivered within 10.0 s"


def test_a_link_that_does_not_come_up_in_time_is_lost_with_what_waits_for_it() -> None:
    clock, network = FakeClock(), LoopbackNetwork()
    sender, receiver = (Rank(name, LAYOUT, network.open, clock) for name in "pd")
    sender.sender.connect(peer_of([receiver]))
    sender.sender.push(PUSH)
    pass_time(clock, TIMEOUT_S * 1.1, sender)
    assert lost(sender.said()) == "the link did not come up within 10.0 s"


def test_a_sender_that_is_not_welcome_is_told_so_before_its_own_deadline() -> None:
    clock, network = FakeClock(), LoopbackNetwork()
    sender, receiver = (Rank(name, LAYOUT, network.open, clock) for name in "pd")
    sender.sender.connect(peer_of([receiver]))
    pass_time(clock, TIMEOUT_S * 0.6, sender, receiver)
    settle([sender, receiver])
    assert lost(sender.said()) == "refused by the receiver: p is not welcome here (yet)"


def test_a_late_welcome_is_in_time_until_then() -> None:
    clock, network = FakeClock(), LoopbackNetwork()
    sender, receiver = (Rank(name, LAYOUT, network.open, clock) for name in "pd")
    sender.sender.connect(peer_of([receiver]))
    pass_time(clock, TIMEOUT_S * 0.45, sender, receiver)
    receiver.receiver.accept(peer_of([sender]))
    settle([sender, receiver])
    assert [type(event) for event in sender.said()] == [PeerConnected]


def test_a_stream_that_never_says_who_it_is_is_closed(pair: tuple[FakeClock, Rank, Rank]) -> None:
    clock, sender, receiver = pair
    stranger = sender.wire.connect(receiver.wire.address)
    settle([receiver])
    pass_time(clock, TIMEOUT_S * 1.2, sender, receiver)
    assert not sender.said()
    assert getattr(stranger, "other", None) is None, "the stream is still open"


def test_a_handoff_that_is_never_expected_fails_alone(
    pair: tuple[FakeClock, Rank, Rank],
) -> None:
    clock, sender, receiver = pair
    sender.sender.push(PUSH)
    settle([sender, receiver])
    pass_time(clock, TIMEOUT_S * 0.6, sender, receiver)
    settle([sender, receiver])
    (failed,) = sender.said()
    assert failed == HandoffFailed(
        handoff=handoff("a"),
        kind="transfer_timeout_error",
        message="the handoff was not expected here within 5.0 s",
    )
    receiver.receiver.expect(EXPECT)
    assert isinstance(receiver.said()[0], HandoffFailed)


def test_an_unexpected_handoff_does_not_keep_others_from_the_link(
    pair: tuple[FakeClock, Rank, Rank],
) -> None:
    _, sender, receiver = pair
    sender.sender.push(PUSH)
    settle([sender, receiver])
    receiver.receiver.expect(
        ExpectHandoff(handoff=handoff("b"), peer_id="p", start=0, num_tokens=16, blocks=blocks(7))
    )
    sender.sender.push(
        PushTokens(handoff=handoff("b"), peer_id="d", start=0, stop=16, blocks=blocks(8), last=True)
    )
    settle([sender, receiver])
    assert [type(event) for event in receiver.said()] == [HandoffReceived]


def test_frames_held_on_a_link_that_broke_are_not_taken_for_those_of_its_successor(
    pair: tuple[FakeClock, Rank, Rank],
) -> None:
    _, sender, receiver = pair
    sender.sender.push(PUSH)
    settle([sender, receiver])
    sender.sender.connect(peer_of([receiver]))
    settle([sender, receiver])
    receiver.receiver.expect(EXPECT)
    settle([sender, receiver])
    assert not any(isinstance(event, HandoffReceived) for event in receiver.said())
    assert [type(event) for event in sender.said()] == [HandoffFailed, PeerConnected]
