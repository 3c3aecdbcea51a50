"""A piece of GPU memory of each rank that all ranks of a group on one host read and write.

It is torch's symmetric memory, met over a store; a world of processes is not needed. NVLink
multicast is not used. Knows nothing of what lies in it.
"""

from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

# torch's own stubs leave out what its backends can do.
_C10D: Any = c10d
_DIST: Any = dist


class PeerMemory:
    """``num_bytes`` of each rank, zeros at first."""

    def __init__(
        self,
        store: Any,  # noqa: ANN401
        *,
        name: str,
        rank: int,
        size: int,
        num_bytes: int,
        device: torch.device,
    ) -> None:
        """Meet the other ranks in ``store``. ``name`` is this group's alone in the process.

        Raises RuntimeError where the GPUs cannot reach each other's memory.
        """
        self._name = name
        group = _DIST.ProcessGroup(_DIST.PrefixStore("peer memory", store), rank, size)
        _C10D._register_process_group(name, group)
        symmetric = _C10D._SymmetricMemory
        self._own = symmetric.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._own.zero_()
        torch.cuda.synchronize(device)  # sync: once met, others may write
        self._handle = symmetric.rendezvous(self._own, name)
        self.of_ranks: tuple[Tensor, ...] = tuple(
            self._handle.get_buffer(each, (num_bytes,), torch.uint8) for each in range(size)
        )

    def close(self) -> None:
        """The memory itself goes with the process: a kernel that waits for a dead peer may use it
        still, and to let it go would wait for that kernel.
        """
        _C10D._unregister_process_group(self._name)
