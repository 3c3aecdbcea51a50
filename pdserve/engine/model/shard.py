"""What layers are made from: the model's shape, weights, and this rank's place in the group."""

from dataclasses import dataclass

from torch import Tensor

from pdserve.core.errors import UnsupportedModelError
from pdserve.core.model_spec import ModelSpec
from pdserve.engine.attention.interface import HeadShape
from pdserve.engine.kernels.interface import Kernels
from pdserve.engine.parallel import TpGroup
from pdserve.engine.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's share of a model in the making."""

    spec: ModelSpec
    weights: Weights
    group: TpGroup
    kernels: Kernels
    kv_heads: range  # the model's KV heads that this rank holds
    heads: HeadShape
    rope_table: Tensor  # [P, D]

    def even_part(self, size: int) -> range:
        """This rank's part of ``size`` rows or columns that all ranks share evenly."""
        each = size // self.group.size
        return range(self.group.rank * each, (self.group.rank + 1) * each)

    def refuse_sliding_window(self) -> None:
        """Raise UnsupportedModelError where the config has a window that the family ignores."""
        if self.spec.sliding_window is not None:
            raise UnsupportedModelError(
                f"config.json: sliding_window {self.spec.sliding_window} is not supported for "
                f"{self.spec.architecture}; it is for MistralForCausalLM"
            )
