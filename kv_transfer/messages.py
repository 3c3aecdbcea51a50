"""What the two ends of a link say to each other: plain data, and the checksum of a frame.

    sender rank                                receiver rank
      Hello ──────────────────────────────────────>           who speaks, what it expects
           <────────────────────────────── Hello | Refused    the same, or the mismatch by field
      Warm + payload ─────────────────────────────>
           <───────────────────────────── Warm + payload      both directions have carried bytes
      Heartbeat ──────────────────────────────────>           the link is up
      Frame + payload ────────────────────────────>           at most a window of them unanswered
           <──────────────── Delivered | Rejected             in the blocks, or not and why

Either side sends Heartbeats. PairOffer belongs to links whose payloads go out of band
(``transports/pair_link.py``), CacheOffer to those whose receiver fetches them itself
(``transports/pull_link.py``).
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from kv_transfer.payload import Payload
from pdserve.core.kv_layout import KvLayout
from pdserve.core.request import HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who speaks. ``peer_id`` is the speaker's incarnation."""

    version: int
    peer_id: str
    rank: int
    layout: KvLayout
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The receiver does not take this sender: the error's kind and text."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Carries a payload of a frame's size, so that no request pays for what comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """KV of some pieces of a handoff. ``heads`` count within those that the link carries."""

    seq: int
    handoff: HandoffId
    pieces: range
    heads: range
    checksum: int | None  # None where the payload is not in host memory


@dataclass(frozen=True, slots=True)
class Delivered:
    """The frame is in the receiver's blocks."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The frame was not taken, and the handoff can not be finished."""

    seq: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The speaker is alive."""


@dataclass(frozen=True, slots=True)
class PairOffer:
    """The store at which the two ranks of a process group meet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOffer:
    """Where the sender's cache can be read, the leases on what it lends, the line to talk over."""

    memory: bytes  # what names the memory to another process
    offset: int  # of block 0 within it
    num_blocks: int
    num_heads: int
    block_size: int
    block_stride_bytes: int
    leases: str
    line: str


Body = Hello | Refused | Warm | Frame | Delivered | Rejected | Heartbeat | PairOffer | CacheOffer


@dataclass(frozen=True, slots=True)
class Announced:
    """The body's payload comes out of band, under this number: it is being sent now."""

    parcel: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message of a link."""

    body: Body
    payload: Payload | None = None
    announced: Announced | None = None


def checksum(handoff: HandoffId, pieces: range, heads: range, payload: Payload) -> int | None:
    """CRC-32 of a frame's place and bytes; None if the bytes are not in host memory."""
    if not isinstance(payload, np.ndarray):
        return None
    place = struct.pack(
        "<6q",
        handoff.attempt,
        handoff.leg,
        pieces.start,
        pieces.stop,
        heads.start,
        heads.stop,
    )
    name = zlib.crc32(handoff.request_id.encode(), zlib.crc32(place))
    return zlib.crc32(payload.data, name)
