"""How large frames are, and how many are on their way, by transport and what is set."""

import pytest

from kv_transfer.commands import PeerConnected
from kv_transfer.frames import MAX_WINDOW, Frames, frames_of
from kv_transfer.messages import Warm
from kv_transfer.outbound import WARM_BYTES
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.transport import Arrived
from pdserve.core.config import MAX_FRAME_BYTES, KvTransferConfig
from tests.fakes import FakeClock
from tests.kv_transfer.nodes import layout
from tests.kv_transfer.threadless import Rank, peer_of, settle

MIB = 1 << 20


@pytest.mark.parametrize(
    ("transport", "frame_bytes", "staging_bytes", "frames"),
    [
        ("grpc", None, None, Frames(2 * MIB, 4)),
        ("gloo", None, None, Frames(2 * MIB, 4)),
        ("nccl", None, None, Frames(256 * MIB, 2)),
        ("nccl", 16 * MIB, None, Frames(16 * MIB, 2)),
        ("nccl", None, 64 * MIB, Frames(32 * MIB, 2)),
        ("nccl", 256 * MIB, 512 * MIB, Frames(256 * MIB, 2)),
        ("grpc", 256 * MIB, None, Frames(64 * MIB, 4)),
        ("gloo", 256 * MIB, 256 * MIB, Frames(64 * MIB, 4)),
        ("nccl", 64 * MIB, 64 * MIB, Frames(64 * MIB, 1)),
        ("grpc", 4 * MIB, None, Frames(4 * MIB, 4)),
        ("grpc", None, 1 << 16, Frames(1 << 16, 1)),
        ("grpc", 1 << 16, 1024 * MIB, Frames(1 << 16, MAX_WINDOW)),
        ("cuda_ipc", MIB, MIB, Frames(256 * MIB, 4)),
    ],
)
def test_what_is_set_holds_and_the_rest_suits_the_transport(
    transport: str, frame_bytes: int | None, staging_bytes: int | None, frames: Frames
) -> None:
    config = KvTransferConfig(frame_bytes=frame_bytes, staging_bytes=staging_bytes)
    assert frames_of(config, transport) == frames


def test_a_link_is_warmed_with_little_however_large_its_frames_are() -> None:
    clock, network = FakeClock(), LoopbackNetwork()
    sender = Rank("p", layout(), network.open, clock, frame_bytes=MAX_FRAME_BYTES)
    receiver = Rank("d", layout(), network.open, clock)
    receiver.receiver.accept(peer_of([sender]))
    sender.sender.connect(peer_of([receiver]))
    warmings = []
    for rank in (receiver, sender, receiver):  # greets, is greeted and warms, is warmed
        while not rank.inbox.empty():
            event = rank.inbox.get()
            if isinstance(event, Arrived) and isinstance(event.message.body, Warm):
                assert event.message.payload is not None
                warmings.append(len(event.message.payload))
            (rank.sender if event.stream.is_dialled else rank.receiver).on(event)
    assert warmings == [WARM_BYTES]
    settle([sender, receiver])
    assert receiver.said() == [PeerConnected(peer_id="p")]
