"""A model directory of a few kilobytes: a tokenizer made here, and the shape of random weights.

Its long prompts take a second or so on one core, so that there is something to disturb.
"""

import json
from pathlib import Path

from tests.text.tiny_models import byte_level, save

CONTEXT = 4096


def make_tiny_model(directory: Path) -> Path:
    """Serve it with ``model.load_format=dummy``: every node draws the same weights."""
    backend = byte_level()
    save(directory, backend, eos_token="<|end|>")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": backend.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": backend.token_to_id("<|end|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
