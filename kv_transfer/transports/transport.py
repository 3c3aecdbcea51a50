"""The seams of a transport: wires make streams of messages, links carry payloads over a stream.

    KvEndpoint ── Link.send ──> Stream.send ~~~~~~ wire ~~~~~~> events ──> Link.on ── KvEndpoint

A ``Wire`` (gRPC, or loopback in tests) makes ordered, reliable streams between two ranks and puts
what happens on them into one queue. A ``Link`` is what a transport's name stands for: payloads
inside the messages, out of band through a process group, or fetched by the receiver. Streams and
wires may have threads; all methods of links are called by the one thread that reads the queue.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch

from kv_transfer.inbox import Sources
from kv_transfer.messages import Message
from kv_transfer.transports.turns import Turns
from pdserve.core.clock import Clock
from pdserve.core.errors import TransferError

SHARED_MEMORY = Path("/dev/shm")  # which other processes of the host can map


class Stream(Protocol):
    """Messages both ways between two ranks. Hashed by identity."""

    @property
    def is_dialled(self) -> bool:
        """True on the side that connected."""

    def send(self, message: Message) -> None:
        """Never waits. Does nothing once the stream is over."""

    def close(self) -> None:
        """Drop it at once. What was sent may be lost. May be called again."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Another rank has connected to us."""

    stream: Stream


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A message came."""

    stream: Stream
    message: Message


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream is over, or never came to be."""

    stream: Stream
    error: TransferError


@dataclass(frozen=True, slots=True)
class PairMet:
    """The stream's process group is made."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class PayloadCame:
    """An announced payload is in its buffer."""

    stream: Stream
    parcel: int


StreamEvent = Opened | Arrived | Closed | PairMet | PayloadCame
StreamEvents = SimpleQueue[StreamEvent]


class Wire(Protocol):
    """Makes streams. Everything that happens on them goes into the queue given at its start."""

    @property
    def host(self) -> str:
        """The address of this host's interface to the others."""

    @property
    def address(self) -> str:
        """Where other ranks connect to."""

    def connect(self, address: str) -> Stream:
        """Never waits: what is sent before the other side answers is kept; failure is Closed."""

    def close(self) -> None:
        """End all streams and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSetting:
    """What links of one endpoint share."""

    events: StreamEvents
    clock: Clock
    host: str
    timeout_s: float
    kv: torch.Tensor  # the rank's cache
    turns: Turns
    staging: torch.cuda.Stream | None = None  # of payloads, where kv is on a GPU
    nccl_channels: int | None = None  # of a pair; None: NCCL's choice
    directory: Path = SHARED_MEMORY  # for the files of links; what is left there is its owner's
    sources: Sources[StreamEvent] = field(default_factory=Sources)  # the endpoint's thread reads
    threads: set[Thread] = field(default_factory=set)  # that links have running, to be waited for


class Payloads(Enum):
    """What a link takes along with a frame."""

    IN_HOST_MEMORY = auto()
    ON_DEVICE = auto()  # tensors where the cache is
    LENT = auto()  # the word where they are: the receiver fetches them


class Link(Protocol):
    """Carries messages with payloads over one stream."""

    @property
    def payloads(self) -> Payloads: ...

    @property
    def is_waiting(self) -> bool:
        """What was to be sent has to wait until another link of the rank has had its turn."""

    def send(self, message: Message) -> None:
        """Never waits."""

    def take_back(self, seq: int) -> None:
        """The blocks of this frame may change from now on."""

    def on(self, event: Arrived | PairMet | PayloadCame) -> Message | None:
        """What has now arrived as a whole. Raises LinkDownError if the event makes no sense."""

    def check(self, now_s: float) -> None:
        """Raises TransferTimeoutError if an operation is overdue."""

    def close(self) -> None:
        """Drop link and stream at once; what is under way is aborted, what is lent taken back.

        May be called again.
        """
