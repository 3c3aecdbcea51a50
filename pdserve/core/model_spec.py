"""A model's shape as its ``config.json`` states it: what nodes, router and engine need to agree on.

Reads files, holds no weights. Which architectures can be run is the engine's business
(``pdserve/engine/model``); here every Hugging Face causal LM config with the usual keys is read.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import identity_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. ``kind`` is ``default``, ``linear`` or ``llama3``; the rest scales the
    latter two.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rotated_share: float = 1.0  # ``partial_rotary_factor``: of each head, from its start


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer. Sizes are of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    max_position: int
    sliding_window: int | None
    hidden_act: str
    attention_bias: bool  # bias on q, k, v (and o where the family has it)
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # of the model's identity

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        return self.hidden_size * (attention + 3 * self.intermediate_size)


def read_model_spec(directory: Path) -> ModelSpec:
    """Read ``config.json`` (and ``generation_config.json`` for the end tokens) of a model
    directory.

    Raises ModelFilesError naming the file and the key that is missing or wrong.
    """
    config = _read_json(directory / "config.json")
    try:
        return _parse(config, directory)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelFilesError(
            f"{directory / 'config.json'}: bad or missing key: {error}"
        ) from error


def _parse(config: dict[str, Any], directory: Path) -> ModelSpec:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    architecture = (config.get("architectures") or ["(none given)"])[0]
    return ModelSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=int(config["max_position_embeddings"]),
        sliding_window=_sliding_window(config),
        hidden_act=str(config.get("hidden_act", "silu")),
        attention_bias=bool(config.get("attention_bias", architecture == "Qwen2ForCausalLM")),
        mlp_bias=bool(config.get("mlp_bias", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(config, directory),
        fingerprint=identity_of(directory).fingerprint,
    )


def _rope(config: dict[str, Any]) -> RopeSpec:
    # transformers 5 nests everything under rope_parameters; earlier ones use rope_theta +
    # rope_scaling.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return RopeSpec(
        theta=theta,
        kind=str(scaling.get("rope_type") or scaling.get("type") or "default"),
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings", 8192)),
        rotated_share=float(
            scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        ),
    )


def _sliding_window(config: dict[str, Any]) -> int | None:
    # Qwen2 writes a window into every config and switches it on with use_sliding_window.
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return None
    return int(window)


def _eos_token_ids(config: dict[str, Any], directory: Path) -> tuple[int, ...]:
    ids: list[int] = []
    generation = directory / "generation_config.json"
    sources = [config, _read_json(generation)] if generation.exists() else [config]
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and token_id not in ids:
                ids.append(int(token_id))
    return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFilesError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
