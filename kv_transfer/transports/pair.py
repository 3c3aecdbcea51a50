"""A process group of two ranks, made at run time, and the one thread that posts to it and waits.

Owns group and thread of one link; makes no message but the offer of where to meet, and says the
word for each send when it is posted. What comes of it goes into the endpoint's queue. The
endpoint's thread watches the deadline and aborts: a call that waits for a dead rank may not return
by itself.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Protocol

import torch
from torch._C._distributed_c10d import Store, TCPStore

from kv_transfer.messages import Message, PairOffer
from kv_transfer.transports.transport import Closed, LinkSetting, PairMet, PayloadCame, Stream
from pdserve.core.errors import LinkDownError, TransferError, TransferTimeoutError

HOST, GUEST = 0, 1  # ranks of the pair; the side that dialled is the host


MAX_IN_TURN = 8  # then another link may have its turn


class Moving(Protocol):
    """A send or a receive that was posted."""

    def wait(self) -> object:
        """Until the bytes have gone, or are there. Raises RuntimeError."""


class Group(Protocol):
    """A process group of two. Calls post, and raise RuntimeError; what follows may be posted
    before the call before it is over.
    """

    def connect(self, other: int, *, sends: bool) -> None:
        """Make what the first operation would make. Both sides call it, one of them sends."""

    def send(self, data: torch.Tensor, other: int) -> Moving: ...

    def receive(self, data: torch.Tensor, other: int) -> Moving: ...

    def abort(self) -> None:
        """From another thread: end what is under way."""


MakeGroup = Callable[[Store, int, LinkSetting], Group]


@dataclass(frozen=True, slots=True)
class Send:
    word: Message  # that announces it
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Receive:
    parcel: int
    data: torch.Tensor


Job = Send | Receive | None  # None: the end


class Pair:
    """The process group of one link and the thread that uses it."""

    def __init__(self, stream: Stream, setting: LinkSetting, make_group: MakeGroup) -> None:
        self._stream = stream
        self._setting = setting
        self._make_group = make_group
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._next: deque[Job] = deque()  # taken from the queue by the thread, not begun
        self._busy_since_s: float | None = None
        self._is_receiving = False  # what was begun last
        self.is_waiting = False  # for its turn; set by the thread
        self._group: Group | None = None
        self._lock = Lock()  # between the group's making and an abort
        self._closed = Event()
        self._thread: Thread | None = None

    def host(self) -> None:
        """Open a store, offer it to the other side and wait there."""
        self._start(None)

    def join(self, offer: PairOffer) -> None:
        """Meet the other side at its store."""
        self._start(offer)

    def do(self, job: Send | Receive) -> None:
        self._jobs.put(job)

    def check(self, now_s: float) -> None:
        """Raises TransferTimeoutError if an operation is overdue."""
        since_s, limit_s = self._busy_since_s, self._limit_s
        if since_s is not None and now_s - since_s > limit_s:
            raise self._overdue(limit_s)

    def close(self) -> None:
        """Abort what is under way and let the group go, which frees the other side as well.

        A call that gloo is blocked in ends when the other side lets go, or at its own timeout.
        """
        self._jobs.put(None)
        with self._lock:
            self._closed.set()
            if self._group is not None:
                self._group.abort()

    def _start(self, offer: PairOffer | None) -> None:
        assert self._thread is None, "a pair meets once"
        self._thread = Thread(target=self._run, args=(offer,), name="kv-pair", daemon=True)
        self._setting.threads.add(self._thread)
        self._thread.start()

    def _run(self, offer: PairOffer | None) -> None:
        try:
            self._use_group(offer)
        except (RuntimeError, OSError) as error:  # whatever torch.distributed fails with
            self._setting.events.put(Closed(self._stream, self._named(error)))
        with self._lock:
            self._group = None  # the last reference: the connection closes
        assert self._thread is not None
        self._setting.threads.discard(self._thread)

    def _use_group(self, offer: PairOffer | None) -> None:
        with self._busy():
            store = self._open_store(offer)
            rank, other = (HOST, GUEST) if offer is None else (GUEST, HOST)
            group = self._make_group(store, rank, self._setting)
        with self._lock:
            self._group = group
            if self._closed.is_set():
                group.abort()
                return
        with self._busy():  # outside a turn: waiting for a dead rank holds up no other link
            self._meet(store, rank, other)
            if rank == HOST and self._closed.is_set():
                return  # nobody would abort what begins now; a guest does not wait for who is gone
            group.connect(other, sends=rank == HOST)
        self._setting.events.put(PairMet(self._stream))
        while (job := self._wait_for_job()) is not None:
            self._move(group, other, job)

    def _named(self, error: Exception) -> TransferError:
        """Our own deadline and that of the process group may be the same; either may come first."""
        since_s, limit_s = self._busy_since_s, self._setting.timeout_s
        if since_s is not None and self._setting.clock.now_s() - since_s >= limit_s:
            return self._overdue(limit_s)
        return LinkDownError(f"process group: {error}")

    @property
    def _limit_s(self) -> float:
        """How long an operation may take. A receive that keeps others waiting has half the time:
        those who send to them count the whole of it from when they began.
        """
        is_in_the_way = self._is_receiving and self._setting.turns.receiving.is_awaited
        return self._setting.timeout_s / (2 if is_in_the_way else 1)

    def _overdue(self, limit_s: float) -> TransferTimeoutError:
        return TransferTimeoutError(f"a process group was busy for more than {limit_s} s")

    def _open_store(self, offer: PairOffer | None) -> Store:
        timeout = timedelta(seconds=self._setting.timeout_s)
        if offer is not None:
            return TCPStore(offer.host, offer.port, 2, timeout=timeout, wait_for_workers=False)
        host = self._setting.host
        with closing(_listen(host)) as listening:  # by itself the store listens on all addresses
            port: int = listening.getsockname()[1]
            store = TCPStore(
                host,
                port,
                2,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=os.dup(listening.fileno()),
            )
        self._stream.send(Message(PairOffer(host, port)))
        return store

    def _meet(self, store: Store, rank: int, other: int) -> None:
        """Wait until the other side has its group too. Raises RuntimeError when it has not in time:
        a connection that one side alone makes may be waited for without end.
        """
        store.set(f"group {rank}", "made")
        store.wait([f"group {other}"], timedelta(seconds=self._setting.timeout_s))

    def _move(self, group: Group, other: int, first: Send | Receive) -> None:
        """Do it, and what is to follow of its kind: posted as soon as it is there, so that neither
        words nor waking cost time between two payloads.
        """
        turns = self._setting.turns
        self.is_waiting, self._is_receiving = True, isinstance(first, Receive)
        with turns.receiving if self._is_receiving else turns.sending, self._busy():
            self.is_waiting = False
            under_way = deque([(first, self._post(group, other, first))])
            num_posted = 1
            while under_way:
                if num_posted < MAX_IN_TURN and (job := self._take_alike(first)) is not None:
                    under_way.append((job, self._post(group, other, job)))
                    num_posted += 1
                else:
                    self._finish(*under_way.popleft())

    def _post(self, group: Group, other: int, job: Send | Receive) -> Moving:
        if isinstance(job, Receive):
            return group.receive(job.data, other)
        self._stream.send(job.word)
        return group.send(job.data, other)

    def _finish(self, job: Send | Receive, moving: Moving) -> None:
        moving.wait()
        self._busy_since_s = self._setting.clock.now_s()
        if isinstance(job, Receive):
            self._setting.events.put(PayloadCame(self._stream, job.parcel))

    def _wait_for_job(self) -> Job:
        return self._next.popleft() if self._next else self._jobs.get()

    def _take_alike(self, first: Send | Receive) -> Send | Receive | None:
        """The next job, if it is there and of the same kind."""
        while not self._jobs.empty():
            self._next.append(self._jobs.get())
        if self._next and type(self._next[0]) is type(first):
            return self._next.popleft()
        return None

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since_s = self._setting.clock.now_s()
        yield
        self._busy_since_s = None


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)
