"""How many KV blocks a GPU has room for: what weights and the largest steps leave of its memory."""

from collections.abc import Callable

import torch

from pdserve.core.errors import ConfigError
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.parallel import TpGroup


def peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """The memory that torch takes from the GPU to do ``work``, beyond what it holds before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    work()
    torch.cuda.synchronize(device)  # sync: what is still running may need more
    return torch.cuda.max_memory_reserved(device) - before


def num_blocks_that_fit(
    config: EngineConfig, utilization: float, reserved_bytes: int, group: TpGroup
) -> int:
    """Blocks for ``utilization`` of the GPU, less what is in use and ``reserved_bytes``.

    The least of all ranks of the group. Raises ConfigError where not even one block fits.
    """
    device = torch.device(config.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = int(total * utilization) - (total - free) - reserved_bytes
    here = torch.tensor([[max(0, left // config.layout.block_stride_bytes)]], device=device)
    num_blocks = int(group.all_gather(here).min())
    if num_blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization: {utilization} of {total} bytes leave no room for KV; "
            f"{total - free} are in use by weights and others, and a step takes {reserved_bytes}"
        )
    return num_blocks
