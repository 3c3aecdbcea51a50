"""GGUF file -> model directory as Hugging Face has it, weights in bfloat16.

    python -m pdserve.models.convert MODEL.gguf NEW_DIRECTORY

Runs as a process of its own: it is the only file that imports transformers, and what that takes in
memory, threads and warnings ends with it. Knows neither the catalog nor the cache.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

# What a loader reads from config.json, by the names that every release of transformers knows.
COPIED_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, config, tokenizer and chat template of `gguf` into the new `directory`.

    The GGUF's quantised weights are expanded to float32 and rounded once to bfloat16.
    """
    directory.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    _write_weights(model, directory)
    _write_json(directory / "config.json", _config(model.config, type(model).__name__))
    _write_json(directory / "generation_config.json", _generation_config(model.config))
    _write_tokenizer(gguf, directory)


def _write_weights(model: PreTrainedModel, directory: Path) -> None:
    tied = model.config.tie_word_embeddings
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    path = directory / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by its owner alone


def _config(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    everything = config.to_dict()
    rope = everything["rope_parameters"]
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r}: only 'default' is converted")
    return {
        "architectures": [architecture],
        **{key: everything[key] for key in COPIED_KEYS},
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "bfloat16",
    }


def _generation_config(config: PreTrainedConfig) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config.to_dict()[name] for name in names}


def _write_tokenizer(gguf: Path, directory: Path) -> None:
    """tokenizer.json, chat_template.jinja, and a tokenizer_config.json for old loaders too."""
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    tokenizer.save_pretrained(directory)
    special = ("bos_token", "eos_token", "pad_token", "unk_token")
    described = {name: getattr(tokenizer, name) for name in special}
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **described},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pdserve.models.convert")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    convert(arguments.gguf, arguments.directory)


if __name__ == "__main__":
    main()
