"""Llama 2 and 3, SmolLM2: grouped-query attention with rotary positions."""

from torch import Tensor

from pdserve.engine.kernels.interface import Rope
from pdserve.engine.model.decoder import Decoder, ModelInput, layer_name
from pdserve.engine.model.linear import QkvLinear, RowLinear
from pdserve.engine.model.shard import Shard


class LlamaAttention:
    """Grouped-query attention. Families differ in which projections have a bias."""

    def __init__(self, shard: Shard, layer: int, *, qkv_bias: bool, out_bias: bool) -> None:
        spec, name = shard.spec, f"{layer_name(layer)}.self_attn"
        self.qkv = QkvLinear(shard, name, bias=qkv_bias)
        self.out = RowLinear(
            shard,
            f"{name}.o_proj",
            in_size=spec.num_heads * spec.head_size,
            out_size=spec.hidden_size,
            bias=out_bias,
        )
        self._layer = layer
        self._rope = Rope(kernels=shard.kernels, table=shard.rope_table)

    def attend(self, x: Tensor, step: ModelInput) -> Tensor:
        q, k, v = self.qkv(x)
        return step.attention.run(self._layer, q, k, v, self._rope)


def build(shard: Shard) -> Decoder:
    """A model of the Llama family."""
    shard.refuse_sliding_window()
    bias = shard.spec.attention_bias
    layers = range(shard.spec.num_layers)
    return Decoder(shard, [LlamaAttention(shard, i, qkv_bias=bias, out_bias=bias) for i in layers])
