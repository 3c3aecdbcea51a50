"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections."""

from pdserve.engine.model.decoder import Decoder
from pdserve.engine.model.llama import LlamaAttention
from pdserve.engine.model.shard import Shard


def build(shard: Shard) -> Decoder:
    """A model of the Qwen2 family; a window over some of its layers is refused."""
    shard.refuse_sliding_window()
    layers = range(shard.spec.num_layers)
    return Decoder(shard, [LlamaAttention(shard, i, qkv_bias=True, out_bias=False) for i in layers])
