"""What one rank is told at its start: the model, its share of it, and the limits of a step.

Made by the rank's owner from the cluster file; plain values, so that it can be shipped to a
process.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.model_spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one rank. ``spec`` is of the whole model, ``kv_cache_bytes`` of one rank."""

    model_dir: Path
    spec: ModelSpec
    load_format: str  # "auto": the weights in model_dir; "dummy": random ones drawn from ``seed``
    device: str  # "cpu", "cuda:0", …
    dtype: str
    tp_size: int
    tp_rank: int
    block_size: int
    kv_dtype: str
    kv_cache_bytes: int
    max_num_seqs: int  # slots
    max_num_batched_tokens: int
    max_model_len: int
    num_threads: int
    attention_backend: str = "auto"
    kernels: str = "auto"
    seed: int = 0  # of dummy weights
    gpu_memory_utilization: float | None = None  # set: KV takes what is left of it, on a GPU
    cuda_graphs: bool = True  # for small steps, where device, backend and TP size allow

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(
                f"model.load_format: {self.load_format!r} is not one of {LOAD_FORMATS}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"model.dtype: {self.dtype!r} is not one of {sorted(DTYPES)}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank: {self.tp_rank} is not a rank of a group of {self.tp_size}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def layout(self) -> KvLayout:
        """How this rank's group keeps its KV cache."""
        return KvLayout(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_size=self.spec.head_size,
            block_size=self.block_size,
            dtype=self.kv_dtype,
            tp_size=self.tp_size,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that fit into ``kv_cache_bytes``. Raises ConfigError where not even one does."""
        stride = self.layout.block_stride_bytes
        if self.kv_cache_bytes < stride:
            raise ConfigError(
                f"kv_cache: {self.kv_cache_bytes} bytes hold no block; one takes {stride} bytes"
            )
        return self.kv_cache_bytes // stride
