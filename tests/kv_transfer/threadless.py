"""Ranks without threads or time: a test decides which message is taken in next, and when it is."""

from queue import SimpleQueue

import torch

from kv_transfer.commands import AcceptPeer, ConnectPeer, KvEvent, Peer
from kv_transfer.frames import Frames
from kv_transfer.local_rank import LocalRank
from kv_transfer.pieces import TORCH_DTYPES, open_pieces
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.transport import LinkSetting, StreamEvents
from kv_transfer.transports.turns import Turns
from pdserve.core.kv_layout import KvLayout
from tests.fakes import FakeClock
from tests.kv_transfer.nodes import OpenWire

TIMEOUT_S = 10.0
WINDOW = 4


class Rank:
    """The sender and the receiver of one rank over a loopback wire; ``events`` are its answers."""

    def __init__(
        self,
        peer_id: str,
        kv: KvLayout,
        open_wire: OpenWire,
        clock: FakeClock,
        *,
        rank: int = 0,
        num_blocks: int = 16,
        frame_bytes: int = 1 << 16,
    ) -> None:
        self.peer_id = peer_id
        self.rank = rank
        self.layout = kv
        self.clock = clock
        dtype = TORCH_DTYPES[kv.dtype]
        self.cache = torch.zeros(num_blocks, *kv.block_shape, dtype=dtype)
        self.inbox: StreamEvents = SimpleQueue()
        self.events: SimpleQueue[KvEvent] = SimpleQueue()
        self.wire = open_wire(self.inbox)
        local = LocalRank(
            peer_id=peer_id,
            rank=rank,
            layout=kv,
            pieces=open_pieces(self.cache, kv),
            frames=lambda _: Frames(frame_bytes, WINDOW),
            timeout_s=TIMEOUT_S,
            clock=clock,
            wire=self.wire,
            links=LinkSetting(
                events=self.inbox,
                clock=clock,
                host=self.wire.host,
                timeout_s=TIMEOUT_S,
                kv=self.cache,
                turns=Turns(),
            ),
            events=self.events,
        )
        self.sender = Sender(local)
        self.receiver = Receiver(local)

    def take_one(self) -> bool:
        """Take in the next message, if there is one."""
        if self.inbox.empty():
            return False
        event = self.inbox.get()
        owner = self.sender if event.stream.is_dialled else self.receiver
        owner.on(event)
        return True

    def tend(self) -> None:
        self.sender.tend(self.clock.now_s())
        self.receiver.tend(self.clock.now_s())

    def said(self) -> list[KvEvent]:
        """The events since the last call."""
        return [self.events.get() for _ in range(self.events.qsize())]

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.wire.close()


def peer_of(ranks: list[Rank], transport: str = "loopback") -> Peer:
    return Peer(
        peer_id=ranks[0].peer_id,
        layout=ranks[0].layout,
        transport=transport,
        addresses=tuple(rank.wire.address for rank in ranks),
    )


def settle(ranks: list[Rank]) -> None:
    """Until nothing is under way."""
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in ranks:
            is_moving |= rank.take_one() or rank.sender.send_next()


def connected_pair(
    sender: KvLayout, receiver: KvLayout, transport: str = "loopback"
) -> tuple[FakeClock, Rank, Rank]:
    """Two nodes of one rank, connected, nothing said yet."""
    clock, network = FakeClock(), LoopbackNetwork()
    first = Rank("p", sender, network.open, clock)
    second = Rank("d", receiver, network.open, clock)
    second.receiver.accept(AcceptPeer(peer=peer_of([first], transport)).peer)
    first.sender.connect(ConnectPeer(peer=peer_of([second], transport)).peer)
    settle([first, second])
    first.said()
    second.said()
    return clock, first, second
