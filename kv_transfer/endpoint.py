"""A rank's KV endpoint: takes its front's commands, moves KV, and tells what came of it.

    handle ──────> inbox ──> one thread: Sender, Receiver, one frame at a time ──> events
    wire's threads ──> inbox
    lines ───────────> inbox

One thread does or begins all that reads or writes blocks or decides, so nothing here needs a lock.
Streams' threads only move messages. The outermost function is
``_run``: an error of ours fails what is under way and the endpoint goes on. Where even that fails,
as after an error of CUDA that stays, it says EndpointFailed and ends.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch

from kv_transfer.commands import (
    AcceptPeer,
    CancelReceive,
    CancelSend,
    ClosePeer,
    ConnectPeer,
    EndpointFailed,
    ExpectHandoff,
    KvCommand,
    KvEvent,
    NameTaken,
    PushTokens,
    TakeName,
)
from kv_transfer.frames import frames_of
from kv_transfer.inbox import Inbox, Sources
from kv_transfer.local_rank import LocalRank
from kv_transfer.pieces import open_pieces
from kv_transfer.reasons import cut
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.grpc_wire import GrpcWire
from kv_transfer.transports.transport import (
    SHARED_MEMORY,
    LinkSetting,
    StreamEvent,
    StreamEvents,
    Wire,
)
from kv_transfer.transports.turns import Turns
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import KvTransferConfig
from pdserve.core.errors import InternalError, LinkDownError
from pdserve.core.kv_layout import KvLayout

logger = logging.getLogger(__name__)

MAX_TICK_S = 1.0
LINK_THREAD_TIMEOUT_S = 5.0
LISTEN_LOCALLY = partial(GrpcWire, host="127.0.0.1")


class _Stop:
    """Ends the endpoint's thread."""


Item = StreamEvent | KvCommand | _Stop


class KvEndpoint:
    """``kv`` is the rank's cache ``[N, Hkv, L, 2, B, D]``, ``peer_id`` the own node's incarnation,
    until the front says ``TakeName``.

    ``open_wire`` is given the queue of stream events; ``partial(GrpcWire, host=…, port_range=…)``
    for another interface than this host's loopback. Files that ranks share have their names in
    ``directory`` until both have opened them; its owner removes what a killed process leaves there.
    Raises InternalError if ``kv`` does not fit ``layout``, ConfigError if no port can be bound.
    """

    def __init__(
        self,
        *,
        kv: torch.Tensor,
        layout: KvLayout,
        rank: int,
        peer_id: str,
        config: KvTransferConfig,
        open_wire: Callable[[StreamEvents], Wire] = LISTEN_LOCALLY,
        directory: Path = SHARED_MEMORY,
    ) -> None:
        staging: torch.cuda.Stream | None = None
        if kv.is_cuda:
            staging = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        pieces = open_pieces(kv, layout, staging)
        clock = MonotonicClock()
        self.events: SimpleQueue[KvEvent] = SimpleQueue()
        sources: Sources[StreamEvent] = Sources()
        self._inbox: Inbox[Item] = Inbox(sources)  # type: ignore[arg-type]  # reads only
        self._came: deque[Item] = deque()
        stream_events: StreamEvents = self._inbox  # type: ignore[assignment]  # puts only
        self._wire = open_wire(stream_events)
        self.address = self._wire.address
        self._links = LinkSetting(
            events=stream_events,
            clock=clock,
            host=self._wire.host,
            timeout_s=config.timeout_s,
            kv=kv,
            turns=Turns(),
            staging=staging,
            nccl_channels=config.nccl_channels,
            directory=directory,
            sources=sources,
        )
        self._local = LocalRank(
            peer_id=peer_id,
            rank=rank,
            layout=layout,
            pieces=pieces,
            frames=partial(frames_of, config),
            timeout_s=config.timeout_s,
            clock=clock,
            wire=self._wire,
            links=self._links,
            events=self.events,
        )
        self._clock = clock
        self._sender = Sender(self._local)
        self._receiver = Receiver(self._local)
        self._tick_s = min(MAX_TICK_S, config.timeout_s / 8)
        self._next_tick_s = clock.now_s() + self._tick_s
        self._is_over = False
        self._thread = Thread(target=self._run, name=f"kv-endpoint-{rank}", daemon=True)
        self._thread.start()

    def handle(self, command: KvCommand) -> None:
        """Returns at once; what comes of it appears in ``events``."""
        self._inbox.put(command)

    def close(self) -> None:
        """Drop all links and end all threads."""
        self._inbox.put(_Stop())
        self._thread.join()
        self._wire.close()
        for thread in list(self._links.threads):  # the other sides have noticed by now
            thread.join(LINK_THREAD_TIMEOUT_S)
        self._inbox.close()

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._turn()
            except Exception as error:
                logger.exception("KV endpoint: everything under way fails")
                self._fail_all(InternalError(f"KV endpoint: {error!r}"))

    def _fail_all(self, error: InternalError) -> None:
        """All peers are lost, or the endpoint is."""
        try:
            self._sender.fail_all(error)
            self._receiver.fail_all(error)
        except Exception:
            logger.exception("KV endpoint: what is under way can not be ended")
            self._is_over = True
            self.events.put(EndpointFailed(reason=cut(str(error))))

    def _turn(self) -> None:
        """Send a frame if one may be sent, else wait; take in all that came.

        Copies are waited for when there is nothing else to do.
        """
        is_busy = self._sender.send_next() or self._receiver.is_copying or self._came
        wait_s = 0.0 if is_busy else self._next_tick_s - self._clock.now_s()
        self._came.extend(self._inbox.take(max(0.0, wait_s)))
        if not self._came and self._receiver.is_copying:
            self._receiver.finish_one()
        while self._came and not self._is_over:  # what an error leaves is taken in the next time
            self._dispatch(self._came.popleft())
        now_s = self._clock.now_s()
        if now_s >= self._next_tick_s:  # all that had come is taken in: nobody is late unheard
            self._next_tick_s = now_s + self._tick_s
            self._sender.tend(now_s)
            self._receiver.tend(now_s)

    def _dispatch(self, item: Item) -> None:
        match item:
            case _Stop():
                self._is_over = True
                self._sender.close()
                self._receiver.close()
            case PushTokens():
                self._sender.push(item)
            case ExpectHandoff():
                self._receiver.expect(item)
            case CancelSend():
                self._sender.cancel(item)
            case CancelReceive():
                self._receiver.cancel(item)
            case ConnectPeer() | AcceptPeer() | ClosePeer():
                self._on_peer(item)
            case TakeName(peer_id=peer_id):
                self._take_name(peer_id)
            case event:
                owner = self._sender if event.stream.is_dialled else self._receiver
                owner.on(event)

    def _on_peer(self, command: ConnectPeer | AcceptPeer | ClosePeer) -> None:
        match command:
            case ConnectPeer(peer=peer):
                self._sender.connect(peer)
            case AcceptPeer(peer=peer):
                self._receiver.accept(peer)
            case ClosePeer(peer_id=peer_id):
                closed = LinkDownError(f"this node has closed its links with {peer_id}")
                self._sender.close_peer(peer_id, closed)
                self._receiver.close_peer(peer_id, closed)

    def _take_name(self, peer_id: str) -> None:
        """Begin anew as another incarnation, at the same address."""
        self._sender.close()
        self._receiver.close()
        self._local = replace(self._local, peer_id=peer_id)
        self._sender = Sender(self._local)
        self._receiver = Receiver(self._local)
        self.events.put(NameTaken(peer_id=peer_id))
