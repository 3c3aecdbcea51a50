"""What both processes of an NCCL test know: the cache's layout, the blocks, a prompt's KV."""

import torch

from pdserve.core.config import KvTransferConfig
from pdserve.core.kv_layout import BlockId, KvLayout
from tests.kv_transfer.nodes import prompt_kv

CONFIG = KvTransferConfig(frame_bytes=1 << 20, staging_bytes=4 << 20, timeout_s=5.0)
LAYOUT = KvLayout(  # a block is 256 KiB
    num_layers=8, num_kv_heads=4, head_size=128, block_size=16, dtype="bfloat16", tp_size=1
)
NUM_BLOCKS = 64
NUM_TOKENS = 500  # 32 blocks, 8 frames
TABLE = tuple(BlockId((7 * i + 3) % NUM_BLOCKS) for i in range(NUM_BLOCKS))


def kv_of(num_tokens: int) -> torch.Tensor:
    """``[Hkv, L, 2, T, D]``, the same in every process."""
    return prompt_kv(LAYOUT, num_tokens, seed=num_tokens)
