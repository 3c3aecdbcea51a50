"""Mistral: Llama with a sliding window, which the attention backend honours (``HeadShape``)."""

from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.llama import LlamaAttention
from pdserve.engine.model.shard import Shard


def build(shard: Shard) -> Decoder:
    """A model of the Mistral family."""
    layers = range(shard.spec.num_layers)
    return Decoder(
        shard, [LlamaAttention(shard, i, qkv_bias=False, out_bias=False) for i in layers]
    )
