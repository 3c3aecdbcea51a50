"""Into how large frames KV is cut, and how many of a link may be unanswered, by transport.

A host's message costs as much for a large frame as for a small one, and what lies in a frame waits
for its end: so small ones where the bytes are slow, large ones where they are fast.
"""

from dataclasses import dataclass

from pdserve.core.config import MIN_FRAME_BYTES, KvTransferConfig

MAX_WINDOW = 8  # frames; more only fill buffers
MAX_HOST_FRAME_BYTES = 64 << 20  # of what goes through host memory, whatever is set


@dataclass(frozen=True, slots=True)
class Frames:
    """``num_bytes``: payload of a frame, at most, unless one head of one piece is larger.

    ``window``: frames on a link that are not yet answered, at most.
    """

    num_bytes: int
    window: int


LENT = Frames(256 << 20, 4)  # nothing is staged; a frame is under a millisecond over NVLink
_FROM_GPU_TO_GPU = Frames(256 << 20, 2)
_THROUGH_HOSTS = Frames(2 << 20, 4)


def frames_of(config: KvTransferConfig, transport: str) -> Frames:
    """What is set, and for the rest what suits the transport."""
    if transport == "cuda_ipc":
        return LENT
    usual, wanted = _FROM_GPU_TO_GPU, config.frame_bytes
    if transport != "nccl":
        usual, wanted = _THROUGH_HOSTS, wanted and min(wanted, MAX_HOST_FRAME_BYTES)
    if config.staging_bytes is None:
        return Frames(wanted or usual.num_bytes, usual.window)
    fitting = max(MIN_FRAME_BYTES, config.staging_bytes // usual.window)
    num_bytes = wanted or min(usual.num_bytes, fitting)
    return Frames(num_bytes, min(MAX_WINDOW, config.staging_bytes // num_bytes))
