"""What fronts and peers are told of an error: its kind and a text of bounded length.

A text may come from another node, or list all blocks of a prompt; what it is told in may hold no
more than a record of a ring or a message of a line.
"""

from kv_transfer.commands import HandoffFailed, PeerLost
from kv_transfer.messages import Refused, Rejected
from pdserve.core.errors import PdserveError
from pdserve.core.request import HandoffId

MAX_REASON_LEN = 500  # characters


def cut(text: str) -> str:
    """The beginning of a text; all of it where it is short."""
    return text if len(text) <= MAX_REASON_LEN else f"{text[: MAX_REASON_LEN - 1]}…"


def failed(handoff: HandoffId, kind: str, text: str) -> HandoffFailed:
    """Tells the front, maybe in the words of another rank."""
    return HandoffFailed(handoff=handoff, kind=cut(kind), message=cut(text))


def lost(peer_id: str, error: PdserveError) -> PeerLost:
    """Tells the front."""
    return PeerLost(peer_id=peer_id, reason=cut(str(error)))


def rejected(seq: int, error: PdserveError) -> Rejected:
    """Tells the sender of a frame."""
    return Rejected(seq=seq, kind=error.kind, message=cut(str(error)))


def refused(error: PdserveError) -> Refused:
    """Tells who dialled."""
    return Refused(kind=error.kind, message=cut(str(error)))
