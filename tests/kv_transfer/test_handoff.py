"""A handoff's state machines, under every order of events that fronts and ranks can produce."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kv_transfer.handoff import (
    Abort,
    Cancel,
    Drained,
    Free,
    PeerGone,
    Push,
    RankDrained,
    RankFailed,
    RankReceived,
    RankSent,
    Ready,
    ReceiverHandoff,
    Report,
    SenderHandoff,
    TokensComputed,
)

FAILED = RankFailed(rank=1, kind="checksum_error", message="bad bytes")


def sent(rank: int) -> RankSent:
    return RankSent(rank=rank, num_bytes=1)


def received(rank: int) -> RankReceived:
    return RankReceived(rank=rank, num_bytes=1)


def computed(num_tokens: int, *, last: bool) -> TokensComputed:
    return TokensComputed(num_tokens=num_tokens, last=last)


def test_pushes_end_on_the_unit_and_the_last_one_takes_the_rest() -> None:
    sender = SenderHandoff(num_ranks=1, unit=8, start=0)
    assert sender.on(computed(20, last=False)) == [Push(start=0, stop=16, last=False)]
    assert sender.on(computed(23, last=False)) == []
    assert sender.on(computed(37, last=True)) == [Push(start=16, stop=37, last=True)]


def test_what_the_receiver_has_is_not_pushed() -> None:
    sender = SenderHandoff(num_ranks=1, unit=8, start=16)
    assert sender.on(computed(8, last=False)) == []
    assert sender.on(computed(23, last=False)) == []
    assert sender.on(computed(24, last=False)) == [Push(start=16, stop=24, last=False)]
    assert sender.on(computed(37, last=True)) == [Push(start=24, stop=37, last=True)]


def test_the_end_is_pushed_also_when_no_token_is_left_to_push() -> None:
    sender = SenderHandoff(num_ranks=1, unit=8, start=0)
    sender.on(computed(16, last=False))
    assert sender.on(computed(16, last=True)) == [Push(start=16, stop=16, last=True)]


def test_blocks_are_free_when_the_last_rank_has_sent() -> None:
    sender = SenderHandoff(num_ranks=2, unit=8, start=0)
    sender.on(computed(8, last=True))
    assert sender.on(sent(1)) == []
    assert sender.on(sent(1)) == []
    assert sender.on(sent(0)) == [Free()]
    assert sender.on(sent(0)) == []


def test_an_abort_cancels_and_waits_for_every_rank_and_reports_nothing() -> None:
    sender = SenderHandoff(num_ranks=2, unit=8, start=0)
    sender.on(computed(8, last=True))
    sender.on(sent(0))
    assert sender.on(Abort()) == [Cancel()]
    assert sender.on(sent(1)) == []
    assert sender.on(RankDrained(rank=0)) == []
    assert sender.on(RankDrained(rank=1)) == [Free()]


@pytest.mark.parametrize(
    "machine", [SenderHandoff(num_ranks=2, unit=4, start=0), ReceiverHandoff(num_ranks=2)]
)
def test_a_failure_is_reported_once_and_drained(machine: Any) -> None:
    assert machine.on(FAILED) == [Cancel(), Report(kind="checksum_error", message="bad bytes")]
    assert machine.on(FAILED) == []
    assert machine.on(Abort()) == []
    assert machine.on(RankDrained(rank=1)) == []
    assert len(machine.on(RankDrained(rank=0))) == 1


@pytest.mark.parametrize(
    "machine", [SenderHandoff(num_ranks=1, unit=4, start=0), ReceiverHandoff(num_ranks=1)]
)
def test_a_lost_peer_still_waits_for_the_own_ranks(machine: Any) -> None:
    gone = PeerGone(reason="connection reset")
    assert machine.on(gone) == [
        Cancel(),
        Report(kind="link_down_error", message="connection reset"),
    ]
    assert len(machine.on(RankDrained(rank=0))) == 1


@pytest.mark.parametrize("event", [Abort(), FAILED, PeerGone(reason="gone"), RankDrained(rank=0)])
def test_news_of_a_received_handoff_means_nothing(event: Any) -> None:
    receiver = ReceiverHandoff(num_ranks=2)
    assert receiver.on(received(0)) == []
    assert receiver.on(received(1)) == [Ready()]
    assert receiver.on(event) == []


class Ranks:
    """What the ranks of one node do with a handoff, as commands.py says; each may touch blocks."""

    def __init__(self, num_ranks: int) -> None:
        self.touching = [True] * num_ranks
        self.settled = [False] * num_ranks  # sent, received or failed was said
        self.cancelled = False
        self.owes_drain = [False] * num_ranks

    def cancel(self) -> None:
        assert not self.cancelled, "cancelled twice"
        self.cancelled = True
        self.owes_drain = [True] * len(self.touching)


class HandoffWorld(RuleBasedStateMachine):
    """One side of a handoff between a front that may abort and ranks that may fail at any time."""

    sending = True

    @initialize(
        num_ranks=st.integers(1, 4), unit=st.sampled_from([1, 4]), start=st.sampled_from([0, 0, 3])
    )
    def start(self, num_ranks: int, unit: int, start: int) -> None:
        self.unit = unit
        self.ranks = Ranks(num_ranks)
        self.machine: Any = (
            SenderHandoff(num_ranks=num_ranks, unit=unit, start=start * unit)
            if self.sending
            else ReceiverHandoff(num_ranks=num_ranks)
        )
        self.computed, self.pushed = 0, start * unit
        self.complete = not self.sending
        self.wanted = True
        self.failed = False
        self.reports = self.ends = 0

    def feed(self, event: Any) -> None:
        for action in self.machine.on(event):
            match action:
                case Push(start=start, stop=stop, last=last):
                    assert start == self.pushed
                    assert stop > start or last
                    assert last or stop % self.unit == 0
                    self.pushed, self.complete = stop, last
                case Cancel():
                    self.ranks.cancel()
                case Report():
                    self.reports += 1
                case Free() | Drained():
                    assert not any(self.ranks.touching), "a rank may still touch the blocks"
                    self.ends += 1
                case Ready():
                    assert all(self.ranks.settled)
                    assert not self.ranks.cancelled
                    self.ends += 1

    @precondition(lambda self: self.sending and not self.complete)
    @rule(num_tokens=st.integers(1, 9), last=st.booleans())
    def compute(self, num_tokens: int, last: bool) -> None:
        self.computed += num_tokens
        self.feed(computed(self.computed, last=last and self.computed >= self.pushed))

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def a_rank_is_done(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.ranks.touching) - 1))
        if self.ranks.touching[rank] and not self.ranks.settled[rank]:
            self.ranks.settled[rank] = True
            self.ranks.touching[rank] = not self.sending and self.ranks.cancelled
            self.feed(sent(rank) if self.sending else received(rank))

    @rule(data=st.data())
    def a_rank_fails(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.ranks.touching) - 1))
        if not self.ranks.settled[rank]:
            self.ranks.settled[rank] = True
            self.failed = self.failed or not self.ranks.cancelled
            self.feed(RankFailed(rank=rank, kind="transfer_error", message="no"))

    @rule(data=st.data())
    def a_rank_drains(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.ranks.touching) - 1))
        if self.ranks.owes_drain[rank]:
            self.ranks.owes_drain[rank] = self.ranks.touching[rank] = False
            self.feed(RankDrained(rank=rank))

    @rule()
    def the_front_aborts(self) -> None:
        self.feed(Abort())

    @rule()
    def the_peer_is_gone(self) -> None:
        self.feed(PeerGone(reason="gone"))

    @rule(data=st.data())
    def old_news_comes_again(self, data: st.DataObject) -> None:
        if self.ends:
            rank = data.draw(st.integers(0, len(self.ranks.touching) - 1))
            done = sent(rank) if self.sending else received(rank)
            event = data.draw(st.sampled_from([done, FAILED, RankDrained(rank=rank)]))
            assert self.machine.on(event) == []

    @invariant()
    def it_ends_once_and_reports_once(self) -> None:
        if hasattr(self, "ranks"):
            assert self.ends <= 1
            assert self.reports <= 1

    def teardown(self) -> None:
        """Whatever happened: once all ranks have answered, the blocks are free exactly once."""
        if not hasattr(self, "ranks"):
            return
        self.feed(Abort())
        for rank, owes in enumerate(self.ranks.owes_drain):
            if owes:
                self.ranks.touching[rank] = False
                self.feed(RankDrained(rank=rank))
        assert self.ends == 1


class SenderWorld(HandoffWorld):
    sending = True


class ReceiverWorld(HandoffWorld):
    sending = False


THOROUGH = settings(max_examples=100, stateful_step_count=25)
TestSenderUnderAnyInterleaving = SenderWorld.TestCase
TestSenderUnderAnyInterleaving.settings = THOROUGH
TestReceiverUnderAnyInterleaving = ReceiverWorld.TestCase
TestReceiverUnderAnyInterleaving.settings = THOROUGH


@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    unit=st.sampled_from([1, 3, 16]),
    num_had=st.integers(0, 12),
)
def test_pushes_follow_each_other_without_gaps_to_the_prompts_end(
    steps: list[int], unit: int, num_had: int
) -> None:
    start = position = min(num_had, (sum(steps) - 1) // unit) * unit
    sender = SenderHandoff(num_ranks=1, unit=unit, start=start)
    total = 0
    for index, step in enumerate(steps):
        total += step
        for action in sender.on(computed(total, last=index == len(steps) - 1)):
            assert isinstance(action, Push)
            assert action.start == position
            position = action.stop
    assert position == total
