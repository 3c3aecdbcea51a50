"""Two ends of a link whose payloads go through a process group, pumped by the test."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from kv_transfer.messages import Announced, Body, Message, Warm
from kv_transfer.payload import Bytes
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.pair_link import PairLink
from kv_transfer.transports.process_group import gloo_link
from kv_transfer.transports.transport import (
    Arrived,
    Closed,
    LinkSetting,
    Opened,
    Stream,
    StreamEvents,
)
from kv_transfer.transports.turns import Turns
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
    return Turns()


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
