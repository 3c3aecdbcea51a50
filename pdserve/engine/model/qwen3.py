"""Qwen3: queries and keys are normed head by head before they are rotated."""

from torch import Tensor

from pdserve.engine.kernels.interface import HeadNorms, Rope
from pdserve.engine.model.decoder import Decoder, ModelInput, layer_name
from pdserve.engine.model.linear import QkvLinear, RowLinear
from pdserve.engine.model.shard import Shard


class Qwen3Attention:
    """Grouped-query attention with QK norm."""

    def __init__(self, shard: Shard, layer: int) -> None:
        spec, name = shard.spec, f"{layer_name(layer)}.self_attn"
        self.qkv = QkvLinear(shard, name, bias=spec.attention_bias)
        self.out = RowLinear(
            shard,
            f"{name}.o_proj",
            in_size=spec.num_heads * spec.head_size,
            out_size=spec.hidden_size,
            bias=spec.attention_bias,
        )
        self._layer = layer
        norms = HeadNorms(
            q=shard.weights.take(f"{name}.q_norm.weight", (spec.head_size,)),
            k=shard.weights.take(f"{name}.k_norm.weight", (spec.head_size,)),
            eps=spec.rms_norm_eps,
        )
        self._rope = Rope(kernels=shard.kernels, table=shard.rope_table, norms=norms)

    def attend(self, x: Tensor, step: ModelInput) -> Tensor:
        q, k, v = self.qkv(x)
        return step.attention.run(self._layer, q, k, v, self._rope)


def build(shard: Shard) -> Decoder:
    """A dense model of the Qwen3 family; a window over some of its layers is refused."""
    shard.refuse_sliding_window()
    return Decoder(shard, [Qwen3Attention(shard, i) for i in range(shard.spec.num_layers)])
