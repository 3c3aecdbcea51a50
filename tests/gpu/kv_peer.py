"""A KV node in a process of its own, on a GPU of its own, that may die or stop at a chosen moment.

    python -m tests.gpu.kv_peer PEER_ID TRANSPORT DEVICE [SIGNAL OPERATION]

It reads commands, one a line, and prints ``ready ADDRESS`` and then the name of each event. With a
SIGNAL it sends that to itself in place of the OPERATION-th call of its process group; call 0 is the
group's making, 1 and 2 warm both directions up, later ones carry frames (the byte that connects the
group is not counted). With cuda_ipc: in place of the OPERATION-th offer, warming or frame of its
link.
"""

import os
import signal
import sys
from threading import Event, Thread

import torch
from torch._C._distributed_c10d import Store

from kv_transfer.commands import AcceptPeer, ConnectPeer, ExpectHandoff, Peer, PushTokens
from kv_transfer.messages import CacheOffer, Frame, Message, Warm
from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.pair import Moving
from kv_transfer.transports.pair_link import PairLink
from kv_transfer.transports.process_group import NcclGroup
from kv_transfer.transports.pull_link import cuda_ipc_link
from kv_transfer.transports.transport import (
    Arrived,
    LinkSetting,
    PairMet,
    PayloadCame,
    Stream,
)
from pdserve.core.environment import set_up_gpu_rank
from tests.gpu.transfers import CONFIG, LAYOUT, NUM_BLOCKS, NUM_TOKENS, TABLE, kv_of
from tests.kv_transfer.nodes import Node, World, handoff


class MortalGroup:
    """NCCL's group, until the chosen call."""

    def __init__(self, store: Store, rank: int, setting: LinkSetting) -> None:
        self._calls = 0
        self._count()
        self._group = NcclGroup(store, rank, setting)

    def connect(self, other: int, *, sends: bool) -> None:
        self._group.connect(other, sends=sends)

    def send(self, data: torch.Tensor, other: int) -> Moving:
        self._count()
        return self._group.send(data, other)

    def receive(self, data: torch.Tensor, other: int) -> Moving:
        self._count()
        return self._group.receive(data, other)

    def abort(self) -> None:
        self._group.abort()

    def _count(self) -> None:
        die_at(self._calls)
        self._calls += 1


class MortalLink:
    """A link whose receiver fetches, until the chosen operation."""

    def __init__(self, stream: Stream, setting: LinkSetting) -> None:
        self._link = cuda_ipc_link(stream, setting)
        self._is_dialled = stream.is_dialled
        self._operations = 0
        self.payloads = self._link.payloads
        self.is_waiting = self._link.is_waiting

    def send(self, message: Message) -> None:
        is_offer = isinstance(message.body, Warm) and self._is_dialled
        if is_offer or isinstance(message.body, Frame):
            self._count()
        self._link.send(message)

    def take_back(self, seq: int) -> None:
        self._link.take_back(seq)

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        if isinstance(event, Arrived) and isinstance(event.message.body, CacheOffer | Frame):
            self._count()
        return self._link.on(event)

    def check(self, now_s: float) -> None:
        self._link.check(now_s)

    def close(self) -> None:
        self._link.close()

    def _count(self) -> None:
        die_at(self._operations)
        self._operations += 1


def die_at(operation: int) -> None:
    """If this is the one. What was to be done next is not: a signal takes a moment to stop us."""
    _, _, _, _, *fate = sys.argv
    if fate and operation == int(fate[1]):
        os.kill(os.getpid(), signal.Signals[fate[0]])
        Event().wait()


def mortal_pair_link(stream: Stream, setting: LinkSetting) -> PairLink:
    return PairLink(stream, setting, MortalGroup, setting.kv.device)


def main() -> None:
    """Serve commands until standard input ends."""
    set_up_gpu_rank()
    TRANSPORTS["nccl"] = "tests.gpu.kv_peer:mortal_pair_link"
    TRANSPORTS["cuda_ipc"] = "tests.gpu.kv_peer:MortalLink"
    _, peer_id, transport, device, *_ = sys.argv
    node = Node(
        peer_id,
        LAYOUT,
        transport,
        World(transport).open_wire,
        config=CONFIG,
        num_blocks=NUM_BLOCKS,
        padding=0,
        device=torch.device(device),
    )
    node.write(kv_of(NUM_TOKENS), TABLE[: LAYOUT.num_blocks_for(NUM_TOKENS)])
    print("ready", node.endpoints[0].address, flush=True)
    Thread(target=tell_events, args=(node,), daemon=True).start()
    for line in sys.stdin:
        obey(node, *line.split())
    node.close()


def tell_events(node: Node) -> None:
    while True:
        print(type(node.endpoints[0].events.get()).__name__, flush=True)


def obey(node: Node, command: str, peer_id: str, word: str) -> None:
    match command:
        case "accept" | "connect":
            peer = Peer(peer_id=peer_id, layout=LAYOUT, transport=node.transport, addresses=(word,))
            node.tell(AcceptPeer(peer=peer) if command == "accept" else ConnectPeer(peer=peer))
        case "push":
            node.tell(
                PushTokens(
                    handoff=handoff(word),
                    peer_id=peer_id,
                    start=0,
                    stop=NUM_TOKENS,
                    blocks=TABLE[: LAYOUT.num_blocks_for(NUM_TOKENS)],
                    last=True,
                )
            )
        case "expect":
            node.tell(
                ExpectHandoff(
                    handoff=handoff(word),
                    peer_id=peer_id,
                    start=0,
                    num_tokens=NUM_TOKENS,
                    blocks=TABLE[::-1][: LAYOUT.num_blocks_for(NUM_TOKENS)],
                )
            )
        case "check":
            same = node.holds(kv_of(NUM_TOKENS), TABLE[::-1])
            print("same" if same else "different", flush=True)


if __name__ == "__main__":
    main()
