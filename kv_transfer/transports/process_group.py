"""The process groups that links use: gloo between host memories, nccl from GPU to GPU.

nccl: the environment of the process must hold TORCH_NCCL_ASYNC_ERROR_HANDLING=0 (or 2) and
TORCH_NCCL_RETHROW_CUDA_ERRORS=0, and have torch's heartbeat monitor off, or its watchdog ends the
process when a peer dies or a group is let go of.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kv_transfer.transports.pair import Moving
from kv_transfer.transports.pair_link import PairLink
from kv_transfer.transports.transport import LinkSetting, Stream
from kv_transfer.transports.turns import Turns


class _TorchGroup(Protocol):
    """What is used of a torch process group; torch's own stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work: ...

    def abort(self) -> None: ...


_C10D: Any = dist  # and what its backends can do


class _GlooGroup:
    def __init__(self, store: Store, rank: int, setting: LinkSetting) -> None:
        options = _C10D.ProcessGroupGloo._Options()
        options._devices = [_C10D.ProcessGroupGloo.create_device(hostname=setting.host)]
        options._timeout = timedelta(seconds=setting.timeout_s)  # nothing else ends a blocked call
        self._group: _TorchGroup = _C10D.ProcessGroupGloo(store, rank, 2, options)

    def connect(self, other: int, *, sends: bool) -> None:
        """It was, when the group was made."""

    def send(self, data: torch.Tensor, other: int) -> Moving:
        return self._group.send([data], other, 0)

    def receive(self, data: torch.Tensor, other: int) -> Moving:
        return self._group.recv([data], other, 0)

    def abort(self) -> None:
        self._group.abort()


class _Posted:
    """Is over when the stream has come so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        self._event.synchronize()  # sync: who waits reads the payload, or lets its memory go


class NcclGroup:
    """Two GPUs, whose communicator is made by the first operation.

    Its streams are of a higher priority: torch has 32 of each and gives them out again and again,
    and one that waits for a dead peer must not be one that copies KV or runs the model.
    """

    def __init__(self, store: Store, rank: int, setting: LinkSetting) -> None:
        torch.cuda.set_device(setting.kv.device)  # of this thread, which makes all calls but abort
        options = _C10D.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=2 * setting.timeout_s)
        options.is_high_priority_stream = True  # of torch's own
        if setting.nccl_channels is not None:
            options.config.min_ctas = options.config.max_ctas = setting.nccl_channels
        self._group: _TorchGroup = _C10D.ProcessGroupNCCL(store, rank, 2, options)
        device = setting.kv.device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._staging = setting.staging
        self._device = device

    def connect(self, other: int, *, sends: bool) -> None:
        with torch.cuda.stream(self._stream):
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        moving = self.send(byte, other) if sends else self.receive(byte, other)
        moving.wait()

    def send(self, data: torch.Tensor, other: int) -> Moving:
        if self._staging is not None:
            self._stream.wait_stream(self._staging)  # on which the payload is being gathered
        data.record_stream(self._stream)  # its memory is another's only when this is over
        with torch.cuda.stream(self._stream):
            self._group.send([data], other, 0).wait()  # in the stream's order, not ours
        return _Posted(self._stream)

    def receive(self, data: torch.Tensor, other: int) -> Moving:
        data.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self._group.recv([data], other, 0).wait()
        return _Posted(self._stream)

    def abort(self) -> None:
        self._group.abort()


def gloo_link(stream: Stream, setting: LinkSetting) -> PairLink:
    """Payloads through host memory. No call spins beside others: none waits for another link's
    turn, which a rank that stops in a frame would keep.
    """
    alone = replace(setting, turns=Turns())
    return PairLink(stream, alone, _GlooGroup, torch.device("cpu"))


def nccl_link(stream: Stream, setting: LinkSetting) -> PairLink:
    """Payloads from GPU to GPU."""
    return PairLink(stream, setting, NcclGroup, setting.kv.device)
