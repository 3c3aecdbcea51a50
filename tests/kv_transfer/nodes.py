"""Nodes for KV tests: a KvEndpoint for each rank, caches with known contents, events waited for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TypeVar

import torch

from kv_transfer.commands import (
    AcceptPeer,
    ConnectPeer,
    ExpectHandoff,
    KvCommand,
    KvEvent,
    Peer,
    PeerConnected,
    PushTokens,
)
from kv_transfer.endpoint import KvEndpoint
from kv_transfer.pieces import TORCH_DTYPES
from kv_transfer.transports.grpc_wire import GrpcWire
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.transport import SHARED_MEMORY, StreamEvents, Wire
from pdserve.core.config import KvTransferConfig
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.core.request import HandoffId

EventT = TypeVar("EventT", bound=KvEvent)
OpenWire = Callable[[StreamEvents], Wire]

WAIT_S = 40.0
CPU = torch.device("cpu")
CONFIG = KvTransferConfig(frame_bytes=1 << 16, staging_bytes=1 << 20, timeout_s=20.0)
LAYOUT = KvLayout(  # a piece of 16 tokens is 32 KiB of one head
    num_layers=4, num_kv_heads=2, head_size=64, block_size=16, dtype="float32", tp_size=1
)


def handoff(name: str, leg: int = 0) -> HandoffId:
    return HandoffId(name, 0, leg)


def layout(**changes: int | str) -> KvLayout:
    return replace(LAYOUT, **changes)  # type: ignore[arg-type]


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def prompt_kv(kv: KvLayout, num_tokens: int, seed: int) -> torch.Tensor:
    """``[Hkv, L, 2, T, D]`` of the whole model, random."""
    generator = torch.Generator().manual_seed(seed)
    shape = (kv.num_kv_heads, kv.num_layers, 2, num_tokens, kv.head_size)
    return torch.randn(shape, generator=generator).to(TORCH_DTYPES[kv.dtype])


class Node:
    """All ranks of one node in this process."""

    def __init__(
        self,
        peer_id: str,
        kv: KvLayout,
        transport: str,
        open_wire: OpenWire,
        *,
        config: KvTransferConfig = CONFIG,
        num_blocks: int = 64,
        padding: int = 16,
        device: torch.device = CPU,
        directory: Path = SHARED_MEMORY,
    ) -> None:
        self.peer_id = peer_id
        self.layout = kv
        self.transport = transport
        dtype = TORCH_DTYPES[kv.dtype]
        size = kv.block_bytes // dtype.itemsize
        shape = (num_blocks, size + padding)
        stores = [torch.full(shape, 7.0, dtype=dtype, device=device) for _ in self.ranks]
        self.caches = [store[:, :size].view(num_blocks, *kv.block_shape) for store in stores]
        self.endpoints = [
            KvEndpoint(
                kv=cache,
                layout=kv,
                rank=rank,
                peer_id=peer_id,
                config=config,
                open_wire=open_wire,
                directory=directory,
            )
            for rank, cache in enumerate(self.caches)
        ]
        self.seen: list[list[KvEvent]] = [[] for _ in self.ranks]

    @property
    def ranks(self) -> range:
        return range(self.layout.tp_size)

    @property
    def peer(self) -> Peer:
        return Peer(
            peer_id=self.peer_id,
            layout=self.layout,
            transport=self.transport,
            addresses=tuple(endpoint.address for endpoint in self.endpoints),
        )

    def tell(self, command: KvCommand) -> None:
        for endpoint in self.endpoints:
            endpoint.handle(command)

    def expect(
        self,
        name: HandoffId,
        peer_id: str,
        num_tokens: int,
        table: Sequence[BlockId],
        *,
        start: int = 0,
    ) -> None:
        self.tell(
            ExpectHandoff(
                handoff=name,
                peer_id=peer_id,
                start=start,
                num_tokens=num_tokens,
                blocks=tuple(table),
            )
        )

    def push(
        self,
        name: HandoffId,
        peer_id: str,
        tokens: range,
        table: Sequence[BlockId],
        *,
        last: bool = True,
    ) -> None:
        self.tell(
            PushTokens(
                handoff=name,
                peer_id=peer_id,
                start=tokens.start,
                stop=tokens.stop,
                blocks=tuple(table),
                last=last,
            )
        )

    def wait(self, kind: type[EventT], name: HandoffId | None = None) -> list[EventT]:
        """One event of this kind (about this handoff) from every rank; the others are kept."""
        return [self.wait_rank(rank, kind, name) for rank in self.ranks]

    def wait_rank(self, rank: int, kind: type[EventT], name: HandoffId | None = None) -> EventT:
        seen = self.seen[rank]
        while True:
            for event in seen:
                if isinstance(event, kind) and name in (None, getattr(event, "handoff", None)):
                    seen.remove(event)
                    return event
            try:
                seen.append(self.endpoints[rank].events.get(timeout=WAIT_S))
            except Empty:
                raise AssertionError(f"{self.peer_id}.{rank}: no {kind}, but {seen}") from None

    def leftover(self) -> list[KvEvent]:
        """Every event that no one waited for."""
        for rank, endpoint in enumerate(self.endpoints):
            while not endpoint.events.empty():
                self.seen[rank].append(endpoint.events.get())
        return [event for seen in self.seen for event in seen]

    def write(self, kv: torch.Tensor, table: Sequence[BlockId]) -> None:
        """Put a prompt's KV ``[Hkv, L, 2, T, D]`` into blocks, on each rank its heads."""
        padded = torch.zeros(*kv.shape[:3], len(table) * self.layout.block_size, kv.shape[4])
        padded[:, :, :, : kv.shape[3]] = kv
        cut = padded.to(kv.dtype).unflatten(3, (len(table), -1)).permute(3, 0, 1, 2, 4, 5)
        for rank, cache in enumerate(self.caches):
            heads = self.layout.heads_of(rank)
            cache[list(table)] = cut[:, heads.start : heads.stop].to(cache.device)
            if cache.is_cuda:
                torch.cuda.synchronize(cache.device)  # endpoints read on streams of their own

    def holds(self, kv: torch.Tensor, table: Sequence[BlockId]) -> bool:
        """True if every rank has, bit by bit, its heads of the prompt's KV in these blocks."""
        table = table[: self.layout.num_blocks_for(kv.shape[3])]
        for rank, cache in enumerate(self.caches):
            heads = self.layout.heads_of(rank)
            rows = cache[list(table)].cpu().permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            got = rows[:, :, :, : kv.shape[3]]
            if not torch.equal(got, kv[heads.start : heads.stop]):
                return False
        return True

    def is_untouched(self, table: Sequence[BlockId]) -> bool:
        return all(bool((cache[list(table)] == 7.0).all()) for cache in self.caches)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


class World:
    """Makes nodes that can reach each other over one transport, and closes them."""

    def __init__(
        self, transport: str, device_of: Callable[[str], torch.device] = lambda peer_id: CPU
    ) -> None:
        self.transport = transport
        self.device_of = device_of
        self.open_wire: OpenWire = partial(GrpcWire, host="127.0.0.1")
        if transport == "loopback":
            self.open_wire = LoopbackNetwork().open
        self.nodes: list[Node] = []

    def node(
        self,
        peer_id: str,
        kv: KvLayout = LAYOUT,
        *,
        config: KvTransferConfig = CONFIG,
        open_wire: OpenWire | None = None,
        directory: Path = SHARED_MEMORY,
    ) -> Node:
        node = Node(
            peer_id,
            kv,
            self.transport,
            open_wire or self.open_wire,
            config=config,
            device=self.device_of(peer_id),
            directory=directory,
        )
        self.nodes.append(node)
        return node

    def pair(
        self,
        sender: KvLayout = LAYOUT,
        receiver: KvLayout = LAYOUT,
        *,
        config: KvTransferConfig = CONFIG,
    ) -> tuple[Node, Node]:
        """Two connected nodes."""
        nodes = self.node("p", sender, config=config), self.node("d", receiver, config=config)
        connect(*nodes)
        return nodes


def connect(sender: Node, receiver: Node) -> None:
    receiver.tell(AcceptPeer(peer=sender.peer))
    sender.tell(ConnectPeer(peer=receiver.peer))
    sender.wait(PeerConnected)
    receiver.wait(PeerConnected)


@contextmanager
def open_world(
    transport: str, device_of: Callable[[str], torch.device] = lambda peer_id: CPU
) -> Iterator[World]:
    world = World(transport, device_of)
    try:
        yield world
    finally:
        for node in world.nodes:
            node.close()
