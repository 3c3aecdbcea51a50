"""The pre-norm decoder that the families share: embedding, layers, final norm, head.

A family differs from the next in its attention, which it gives to the layers. ``T`` are the step's
tokens over all sequences; the model does not know where one ends, attention and positions do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBackend
from pdserve.engine.model.embedding import VocabEmbedding, VocabHead
from pdserve.engine.model.linear import GatedLinear, RowLinear, RowsOf
from pdserve.engine.model.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One step's tokens, on the device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBackend  # planned for this step
    last_rows: Tensor | None  # [R] int64, the tokens that are sampled after; None: all


class CausalLM(Protocol):
    """A model as the runner sees it."""

    def forward(self, step: ModelInput) -> Tensor:
        """Hidden states ``[R, hidden]`` of ``last_rows`` after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden]`` → ``[R, V]``, for the rows that sample only."""


class SelfAttention(Protocol):
    """A layer's mixing of tokens, and what then looks at one token at a time."""

    def attend(self, x: Tensor, step: ModelInput) -> Tensor:
        """``[T, hidden]`` → ``[T, Hq * D]``; the step's KV is written."""

    def out(self, attended: Tensor) -> Tensor:
        """``[R, Hq * D]`` → ``[R, hidden]``."""


class RmsNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, shard: Shard, name: str, size: int) -> None:
        self._weight = shard.weights.take(f"{name}.weight", (size,))
        self._eps = shard.spec.rms_norm_eps
        self._kernels = shard.kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x``, in place; the norm of the sum."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shard: Shard, name: str) -> None:
        spec = shard.spec
        size = spec.intermediate_size
        rows = shard.even_part(size)
        gate = RowsOf(name=f"{name}.gate_proj", out_size=size, rows=rows)
        up = RowsOf(name=f"{name}.up_proj", out_size=size, rows=rows)
        bias = spec.mlp_bias
        self.gated = GatedLinear(shard, gate, up, in_size=spec.hidden_size, bias=bias)
        self.down = RowLinear(
            shard, f"{name}.down_proj", in_size=size, out_size=spec.hidden_size, bias=bias
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(x))


class DecoderLayer:
    """Attention, then the MLP, each after a norm and added to the residual stream.

    What comes in and goes out is still to be added to ``residual``, which changes in place.
    """

    def __init__(self, shard: Shard, layer: int, attention: SelfAttention) -> None:
        name, hidden_size = layer_name(layer), shard.spec.hidden_size
        self.input_norm = RmsNorm(shard, f"{name}.input_layernorm", hidden_size)
        self.attention = attention
        self.post_norm = RmsNorm(shard, f"{name}.post_attention_layernorm", hidden_size)
        self.mlp = GatedMlp(shard, f"{name}.mlp")

    def attend(self, x: Tensor, residual: Tensor, step: ModelInput) -> Tensor:
        return self.attention.attend(self.input_norm.add(x, residual), step)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """What each token does for itself."""
        x = self.attention.out(attended)
        return self.mlp.forward(self.post_norm.add(x, residual))


class Decoder:
    """A whole model around the layers of its family."""

    def __init__(self, shard: Shard, attention: Sequence[SelfAttention]) -> None:
        self.embedding = VocabEmbedding(shard, "model.embed_tokens.weight")
        self.layers = [DecoderLayer(shard, i, each) for i, each in enumerate(attention)]
        self.norm = RmsNorm(shard, "model.norm", shard.spec.hidden_size)
        tied = self.embedding if shard.spec.tie_word_embeddings else None
        self.head = VocabHead(shard, "lm_head.weight", tied)

    def forward(self, step: ModelInput) -> Tensor:
        x = self.embedding(step.token_ids)
        residual = torch.zeros_like(x)
        for layer in self.layers[:-1]:
            x = layer.finish(layer.attend(x, residual, step), residual)
        last = self.layers[-1]
        attended = last.attend(x, residual, step)
        if step.last_rows is not None:  # every KV is written: nobody reads the other rows
            if len(step.last_rows) == 0:
                last.attention.out(attended[:1])  # summed when all ranks have written their KV
                return residual[:0]
            attended, residual = attended[step.last_rows], residual[step.last_rows]
        return self.norm.add(last.finish(attended, residual), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def layer_name(index: int) -> str:
    """Where a layer's tensors are in a checkpoint."""
    return f"model.layers.{index}"
