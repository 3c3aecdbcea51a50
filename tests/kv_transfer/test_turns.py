"""Turns: who came first is next, and a link with much to send keeps no other waiting."""

import time
from collections.abc import Callable
from threading import Thread

import pytest
import torch

from kv_transfer.messages import Heartbeat, Message
from kv_transfer.transports.pair import MAX_IN_TURN
from kv_transfer.transports.pair_link import PairLink
from kv_transfer.transports.transport import LinkSetting, Stream
from kv_transfer.transports.turns import Turn
from tests.fakes import FakeClock
from tests.kv_transfer.pair_ends import SMALL, LateGroup, late_link, linked, meet, some_turns


def wait_for(turn: Turn, num_waiting: int) -> None:
    while len(turn._places) <= num_waiting:
        time.sleep(0.001)


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turn, order = Turn(), list[int]()

    def take(number: int) -> None:
        with turn:
            order.append(number)

    threads = [Thread(target=take, args=(number,)) for number in range(5)]
    with turn:
        for number, thread in enumerate(threads):
            thread.start()
            wait_for(turn, number + 1)
        assert not order
    take(5)
    for thread in threads:
        thread.join(20)
    assert order == [0, 1, 2, 3, 4, 5]


def test_a_turn_that_ends_with_an_error_is_over() -> None:
    turn = Turn()
    with pytest.raises(RuntimeError), turn:
        raise RuntimeError("aborted")
    with turn:
        pass


def test_a_link_with_much_to_send_gives_others_their_turn() -> None:
    turns, posted = some_turns(), list[str]()

    def named(name: str) -> Callable[[Stream, LinkSetting], PairLink]:
        class NamedGroup(LateGroup):
            def send(self, data: torch.Tensor, other: int) -> LateGroup:
                posted.append(name)
                return super().send(data, other)

        return lambda stream, setting: PairLink(stream, setting, NamedGroup, torch.device("cpu"))

    with (
        linked(FakeClock(), turns, some_turns(), named("busy")) as (busy, at_busy),
        linked(FakeClock(), turns, some_turns(), named("other")) as (other, at_other),
    ):
        meet(busy, at_busy, SMALL)
        meet(other, at_other, SMALL)
        posted.clear()
        with turns.sending:
            for _ in range(3 * MAX_IN_TURN):
                busy.link.send(Message(Heartbeat(), SMALL))
            wait_for(turns.sending, 1)
            other.link.send(Message(Heartbeat(), SMALL))
            wait_for(turns.sending, 2)
        while len(posted) <= 3 * MAX_IN_TURN:
            time.sleep(0.001)
        assert posted.index("other") == MAX_IN_TURN


def test_a_link_says_that_it_waits_for_the_turn_of_another() -> None:
    turns = some_turns()
    with linked(FakeClock(), turns, some_turns(), late_link) as (sender, receiver):
        meet(sender, receiver, SMALL)
        with turns.sending:
            sender.link.send(Message(Heartbeat(), SMALL))
            wait_for(turns.sending, 1)
            assert sender.link.is_waiting
        while receiver.take() is None:
            pass
        assert not sender.link.is_waiting
