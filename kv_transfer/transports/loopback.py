"""A wire within one process: messages go from queue to queue. For tests, and without any thread."""

import itertools

from kv_transfer.messages import Message
from kv_transfer.transports.transport import Arrived, Closed, Opened, Stream, StreamEvents
from pdserve.core.errors import LinkDownError


class LoopbackNetwork:
    """Where the wires of one process find each other."""

    def __init__(self) -> None:
        self._wires: dict[str, LoopbackWire] = {}
        self._numbers = itertools.count()

    def open(self, events: StreamEvents) -> "LoopbackWire":
        wire = LoopbackWire(self, f"loopback:{next(self._numbers)}", events)
        self._wires[wire.address] = wire
        return wire

    def find(self, address: str) -> "LoopbackWire | None":
        return self._wires.get(address)

    def forget(self, wire: "LoopbackWire") -> None:
        self._wires.pop(wire.address, None)


class LoopbackWire:
    """One endpoint's place in the network. Made by ``LoopbackNetwork.open``."""

    host = "127.0.0.1"

    def __init__(self, network: LoopbackNetwork, address: str, events: StreamEvents) -> None:
        self.address = address
        self.events = events
        self.streams: list[LoopbackStream] = []
        self._network = network

    def connect(self, address: str) -> Stream:
        ours = LoopbackStream(self.events, is_dialled=True)
        self.streams.append(ours)
        other = self._network.find(address)
        if other is None:
            self.events.put(Closed(ours, LinkDownError(f"nothing listens at {address}")))
            return ours
        theirs = LoopbackStream(other.events, is_dialled=False)
        other.streams.append(theirs)
        ours.other, theirs.other = theirs, ours
        other.events.put(Opened(theirs))
        return ours

    def close(self) -> None:
        self._network.forget(self)
        for stream in self.streams:
            stream.close()


class LoopbackStream:
    """One end of a stream; ``events`` is the queue of the endpoint at this end."""

    def __init__(self, events: StreamEvents, *, is_dialled: bool) -> None:
        self.is_dialled = is_dialled
        self.events = events
        self.other: LoopbackStream | None = None

    def send(self, message: Message) -> None:
        if (other := self.other) is not None:
            other.events.put(Arrived(other, message))

    def close(self) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            other.events.put(Closed(other, LinkDownError("the other side closed the stream")))
