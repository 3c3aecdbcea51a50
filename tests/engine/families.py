"""Tiny random models of each family, made and run by transformers, not by us."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

logging.disable_progress_bar()

VOCAB_SIZE = 199
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama_biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama3_rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "linear_rope": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=9),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "three_kv_heads": LlamaConfig(
        **(SHAPE | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3})
    ),
    "one_kv_head": LlamaConfig(
        **(SHAPE | {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 1})
    ),
}


def save_model(family: str, directory: Path, **saving) -> Path:
    """Random weights that make logits differ; biases and norms are not left at 0 and 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for name, weight in model.named_parameters():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        weight.data.normal_(centre, 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5)
    model.save_pretrained(directory, **saving)
    return directory


@torch.inference_mode()
def reference_logprobs(directory: Path, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities ``[V]`` of the token after ``token_ids``, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: Tensor = model(torch.tensor([list(token_ids)])).logits
    return logits[0, -1].log_softmax(-1)


@torch.inference_mode()
def reference_prompt_logprobs(directory: Path, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities ``[P - 1, V]`` at each position but the last, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: Tensor = model(torch.tensor([list(token_ids)])).logits
    return logits[0, :-1].log_softmax(-1)


@torch.inference_mode()
def reference_greedy(
    directory: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Greedy continuations, without an end token, of each prompt on its own."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        for _ in range(num_tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers
