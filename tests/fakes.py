"""Small stand-ins behind our Protocols, shared by the tests of several folders."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kv_transfer.commands import (
    CancelReceive,
    CancelSend,
    ConnectPeer,
    KvCommand,
    KvEvent,
    PeerConnected,
    ReceiveDrained,
    SendDrained,
)
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.batch import Batch, Sampled, StepOutput

TINY_LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=2, head_size=8, block_size=4, dtype="float32", tp_size=1
)


def fake_output(batch: Batch) -> StepOutput:
    """What ``FakeRunner`` samples: 1000 × slot + position of the token that the chunk ends with."""
    return StepOutput(
        step=batch.step,
        sampled=tuple(
            Sampled(tokens=(1000 * chunk.slot + chunk.start + chunk.length,) * chunk.num_samples)
            for chunk in batch.chunks
            if chunk.num_samples
        ),
    )


class FakePendingStep:
    """A step of ``FakeRunner``; its output is known from the start."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def wait(self) -> StepOutput:
        return fake_output(self._batch)


class FakeRunner:
    """A runner without a model. ``on_launch`` is called with each batch and may fail or block."""

    def __init__(
        self,
        *,
        layout: KvLayout = TINY_LAYOUT,
        num_blocks: int = 64,
        on_launch: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.launched: list[int] = []
        self._on_launch = on_launch

    def launch(self, batch: Batch) -> FakePendingStep:
        self.launched.append(batch.step)
        self._on_launch(batch)
        return FakePendingStep(batch)

    def warm_up(self) -> None:
        pass


class FakeEndpoint:
    """An endpoint that moves nothing and confirms at once what needs no data."""

    def __init__(self, address: str = "127.0.0.1:1") -> None:
        self.address = address
        self.events: SimpleQueue[KvEvent] = SimpleQueue()
        self.handled: list[KvCommand] = []
        self.closed = threading.Event()

    def handle(self, command: KvCommand) -> None:
        self.handled.append(command)
        match command:
            case ConnectPeer():
                self.events.put(PeerConnected(peer_id=command.peer.peer_id))
            case CancelSend():
                self.events.put(SendDrained(handoff=command.handoff))
            case CancelReceive():
                self.events.put(ReceiveDrained(handoff=command.handoff))
            case _:
                pass

    def close(self) -> None:
        self.closed.set()


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        assert duration_s >= 0
        self._now_s += duration_s
