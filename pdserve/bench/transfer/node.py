"""One of the two nodes of a measured transfer: a cache and a KV endpoint for each of its ranks."""

import random
import sys
from dataclasses import dataclass
from functools import partial
from queue import Empty
from typing import TypeVar

import torch

from kv_transfer.commands import HandoffFailed, KvCommand, KvEvent, Peer, PeerLost
from kv_transfer.endpoint import KvEndpoint
from kv_transfer.transports.grpc_wire import GrpcWire
from pdserve.core.config import KvTransferConfig
from pdserve.core.environment import set_up_gpu_rank
from pdserve.core.errors import TransferError
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.rank.process import SWITCH_INTERVAL_S

EventT = TypeVar("EventT", bound=KvEvent)

_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetting:
    """What both processes are told. ``devices``: of the ranks, in turn."""

    peer_id: str
    layout: KvLayout
    num_blocks: int
    devices: tuple[str, ...]
    config: KvTransferConfig


class TransferNode:
    """Owns caches and endpoints. Blocks of a prompt lie in random order."""

    def __init__(self, setting: NodeSetting) -> None:
        self._setting = setting
        layout = setting.layout
        self._caches = [
            KvCache(layout, setting.num_blocks, _device(setting, rank))
            for rank in range(layout.tp_size)
        ]
        for rank, cache in enumerate(self._caches):
            torch.manual_seed(rank)
            cache.tensor.normal_()
            if cache.tensor.is_cuda:
                torch.cuda.synchronize(cache.tensor.device)
        self._endpoints = [
            KvEndpoint(
                kv=cache.tensor,
                layout=layout,
                rank=rank,
                peer_id=setting.peer_id,
                config=setting.config,
                open_wire=partial(GrpcWire, host="127.0.0.1"),
            )
            for rank, cache in enumerate(self._caches)
        ]

    @property
    def peer(self) -> Peer:
        return Peer(
            peer_id=self._setting.peer_id,
            layout=self._setting.layout,
            transport=self._setting.config.transport,
            addresses=tuple(endpoint.address for endpoint in self._endpoints),
        )

    def table(self, num_tokens: int) -> tuple[BlockId, ...]:
        """The blocks of a prompt, the same for the same length."""
        draw = random.Random(f"{self._setting.peer_id} {num_tokens}")
        count = self._setting.layout.num_blocks_for(num_tokens)
        return tuple(map(BlockId, draw.sample(range(self._setting.num_blocks), count)))

    def tell(self, command: KvCommand) -> None:
        for endpoint in self._endpoints:
            endpoint.handle(command)

    def wait(self, kind: type[EventT]) -> list[EventT]:
        """Such an event from every rank. Raises TransferError where another one comes first."""
        return [self._wait_rank(endpoint, kind) for endpoint in self._endpoints]

    def checksum(self, num_tokens: int) -> int:
        """Of a prompt's KV over all ranks: equal at both nodes where no head has replicas."""
        table = list(self.table(num_tokens))
        total = 0
        for cache in self._caches:
            kv = cache.tensor[table].movedim(4, 1)  # [N, B, Hkv, L, 2, D]
            bits = kv.flatten(0, 1)[:num_tokens].view(_BITS[cache.dtype.itemsize])
            total += int(bits.sum(dtype=torch.int64))  # whole numbers: in any order the same
        return total

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.close()

    def _wait_rank(self, endpoint: KvEndpoint, kind: type[EventT]) -> EventT:
        try:
            event = endpoint.events.get(timeout=2 * self._setting.config.timeout_s)
        except Empty:
            raise TransferError(f"no {kind.__name__} came in time") from None
        if isinstance(event, kind):
            return event
        reason = event.reason if isinstance(event, PeerLost) else ""
        reason = event.message if isinstance(event, HandoffFailed) else reason
        raise TransferError(f"{type(event).__name__} where {kind.__name__} was due: {reason}")


def set_up_process(setting: NodeSetting) -> None:
    """As a rank process sets itself up."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if torch.device(setting.devices[0]).type == "cuda":
        set_up_gpu_rank()
    torch.set_num_threads(1)


def _device(setting: NodeSetting, rank: int) -> torch.device:
    return torch.device(setting.devices[rank % len(setting.devices)])
