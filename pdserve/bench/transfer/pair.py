"""Two processes, one node in each, and prompts' KV that goes from one to the other.

here, the sender                                the other process, the receiver
  what is expected ── pipe ──> ExpectHandoff
  PushTokens ════════════ KV ═══════════> HandoffReceived
  HandoffSent    <── pipe ── when that was
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from kv_transfer.commands import (
    AcceptPeer,
    ConnectPeer,
    ExpectHandoff,
    HandoffReceived,
    HandoffSent,
    Peer,
    PeerConnected,
    PushTokens,
)
from pdserve.bench.transfer.node import NodeSetting, TransferNode, set_up_process
from pdserve.core.errors import TransferError
from pdserve.core.request import HandoffId

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Prompts' KV. Times from the first push on, by the clock that a host's processes share."""

    there_s: float  # until all ranks of the receiver say that it may be read
    acknowledged_s: float  # until all ranks of the sender know that
    num_bytes: int


class Pair:
    """The sender's node, and the pipe to the receiver's process."""

    def __init__(self, node: TransferNode, receiver_id: str, pipe: Connection) -> None:
        self._node = node
        self._receiver_id = receiver_id
        self._pipe = pipe
        self._num_handoffs = 0

    def move(self, num_tokens: int, count: int = 1) -> Moved:
        """Move so many prompts that are computed at once."""
        numbers = range(self._num_handoffs, self._num_handoffs + count)
        self._num_handoffs = numbers.stop
        handoffs = tuple(HandoffId(f"{num_tokens}-{number}", 0, 0) for number in numbers)
        self._pipe.send((handoffs, num_tokens))
        self._hear()  # it expects them
        pushes = [self._push(handoff, num_tokens) for handoff in handoffs]
        start_s = time.monotonic()
        for push in pushes:
            self._node.tell(push)
        sent = [event for _ in pushes for event in self._node.wait(HandoffSent)]
        sent_s = time.monotonic()
        there_s = self._hear()
        assert isinstance(there_s, float)
        return Moved(
            there_s=there_s - start_s,
            acknowledged_s=sent_s - start_s,
            num_bytes=sum(event.num_bytes for event in sent),
        )

    def is_same(self, num_tokens: int) -> bool:
        """What came last of this length is what was sent."""
        self._pipe.send(((), num_tokens))
        theirs = self._hear()
        return theirs == self._node.checksum(num_tokens)

    def _push(self, handoff: HandoffId, num_tokens: int) -> PushTokens:
        return PushTokens(
            handoff=handoff,
            peer_id=self._receiver_id,
            start=0,
            stop=num_tokens,
            blocks=self._node.table(num_tokens),
            last=True,
        )

    def _hear(self) -> object:
        if not self._pipe.poll(START_TIMEOUT_S):
            raise TransferError("the receiver's process is silent")
        try:
            return self._pipe.recv()
        except EOFError:
            raise TransferError("the receiver's process ended; its error is above") from None


@contextmanager
def connected_pair(sender: NodeSetting, receiver: NodeSetting) -> Iterator[Pair]:
    """Both, linked and warm. Raises TransferError."""
    processes = get_context("spawn")
    here, there = processes.Pipe()
    child = processes.Process(target=_receive, args=(there, receiver), daemon=True)
    child.start()
    there.close()
    set_up_process(sender)
    node = TransferNode(sender)
    pair = Pair(node, receiver.peer_id, here)
    try:
        here.send(node.peer)
        peer = pair._hear()
        assert isinstance(peer, Peer)
        node.tell(ConnectPeer(peer=peer))
        node.wait(PeerConnected)
        yield pair
    finally:
        here.close()
        node.close()
        child.join(END_TIMEOUT_S)
        child.kill()


def _receive(pipe: Connection, setting: NodeSetting) -> None:
    """The receiver's process: expects what it is told to, until the pipe is closed."""
    set_up_process(setting)
    node = TransferNode(setting)
    try:
        sender: Peer = pipe.recv()
        node.tell(AcceptPeer(peer=sender))
        pipe.send(node.peer)
        node.wait(PeerConnected)
        while True:
            _obey(node, sender.peer_id, pipe, *pipe.recv())
    except EOFError:
        node.close()


def _obey(
    node: TransferNode,
    sender_id: str,
    pipe: Connection,
    handoffs: tuple[HandoffId, ...],
    num_tokens: int,
) -> None:
    """All of them go into the same blocks: they carry the same."""
    if not handoffs:
        pipe.send(node.checksum(num_tokens))
        return
    for handoff in handoffs:
        node.tell(
            ExpectHandoff(
                handoff=handoff,
                peer_id=sender_id,
                start=0,
                num_tokens=num_tokens,
                blocks=node.table(num_tokens),
            )
        )
    pipe.send("expected")
    for _ in handoffs:
        node.wait(HandoffReceived)
    pipe.send(time.monotonic())
