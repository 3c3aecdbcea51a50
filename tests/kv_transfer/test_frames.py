"""How large frames are, and how many are on their way, by transport and what is set."""

import pytest

from kv_transfer.frames import MAX_WINDOW, Frames, frames_of
from pdserve.core.config import KvTransferConfig

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
