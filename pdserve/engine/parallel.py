"""The tensor-parallel group of one node: sums and gathers between its ranks.

A group is made from a file store on the node's host, without a global process world, so that a
process may belong to several groups. Ranks on GPUs exchange through each other's memory where they
can (``peer_group.py``), else over NCCL. Knows nothing of models; the layers that cut weights call
it.
"""

import datetime
import logging
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.core.errors import RankError
from pdserve.core.plugin import load_plugin

logger = logging.getLogger(__name__)


class TpGroup(Protocol):
    """Collective operations; every rank of the group calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def runs_in_graphs(self) -> bool:
        """True if CUDA graphs may hold its operations."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, bitwise the same on every rank; ``x`` may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x`` ``[R, n]`` side by side: ``[R, size * n]``."""

    def close(self) -> None: ...


class SoloGroup:
    """A group of one rank: nothing to exchange."""

    rank = 0
    size = 1
    runs_in_graphs = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        pass


# torch's own stubs leave out what its backends can do.
_C10D: Any = dist


class ProcessTpGroup:
    """Ranks in processes of one host, over a torch process group (gloo or nccl)."""

    runs_in_graphs = False

    def __init__(self, process_group: Any) -> None:  # noqa: ANN401
        self._process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        try:
            self._process_group.allreduce([x]).wait()
        except RuntimeError as error:
            raise RankError(f"tensor-parallel sum on rank {self.rank}: {error}") from error
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        num_rows, width = x.shape
        parts = x.new_empty(self.size * num_rows, width)
        try:
            self._process_group._allgather_base(parts, x.contiguous()).wait()
        except RuntimeError as error:
            raise RankError(f"tensor-parallel gather on rank {self.rank}: {error}") from error
        parts = parts.view(self.size, num_rows, width)
        return parts.transpose(0, 1).reshape(num_rows, self.size * width)

    def close(self) -> None:
        self._process_group.abort()
        # Ended here, with its threads: at the interpreter's end they may outlive what they need.
        del self._process_group


def start_tp_group(
    *, store_path: Path, tp_rank: int, tp_size: int, device: torch.device, timeout_s: float
) -> TpGroup:
    """Meet the other ranks of the node at ``store_path`` and connect to each of them.

    ``store_path`` is a file that does not exist yet, fresh for every start of the group, on a file
    system of the host. ``timeout_s`` bounds the meeting and each later operation; RankError where
    it passes.
    """
    if tp_size == 1:
        return SoloGroup()
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = _C10D.FileStore(str(store_path), tp_size)
        store.set_timeout(timeout)
        backend = _nccl if device.type == "cuda" else _gloo
        group = ProcessTpGroup(backend(store, tp_rank, tp_size, timeout))
        # Connections that a library makes on first use are made here, not in the first request.
        group.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda":
            return _over_peer_memory(group, store, str(store_path), device)
    except RuntimeError as error:
        raise RankError(f"tensor-parallel group: rank {tp_rank} of {tp_size}: {error}") from error
    return group


def _over_peer_memory(
    group: ProcessTpGroup,
    store: Any,  # noqa: ANN401
    name: str,
    device: torch.device,
) -> TpGroup:
    """The same ranks over each other's memory; ``group`` itself where one of them cannot."""
    found: TpGroup | None = None
    try:
        start = load_plugin("pdserve.engine.peer_group:PeerTpGroup")
    except ImportError as error:
        logger.warning("tensor parallelism without peer memory: %s", error)
        start = None
    if _all_can(group, start is not None, device):
        try:
            found = start(store, name=name, rank=group.rank, size=group.size, device=device)
        except RuntimeError as error:
            logger.warning("tensor parallelism without peer memory: %s", error)
        if _all_can(group, found is not None, device) and found is not None:
            logger.info("tensor parallelism: through the memory of %d GPUs", group.size)
            found.all_reduce(torch.zeros(4, device=device))
            torch.cuda.synchronize(device)  # sync: no rank needs NCCL any more
            group.close()
            return found
    logger.info("tensor parallelism: over NCCL, and steps without CUDA graphs")
    if found is not None:
        found.close()
    return group


def _all_can(group: ProcessTpGroup, here: bool, device: torch.device) -> bool:
    """True if ``here`` is true on every rank."""
    num_lacking = group.all_reduce(torch.full((1,), float(not here), device=device))
    return num_lacking.item() == 0


def _gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:  # noqa: ANN401
    gloo = _C10D.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # The loopback address by number: a host name may resolve to an address nobody listens on.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:  # noqa: ANN401
    options = _C10D.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _C10D.ProcessGroupNCCL(store, rank, size, options)
