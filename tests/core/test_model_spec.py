"""A model's shape from its ``config.json``, as several versions of several families write it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ModelFilesError
from pdserve.core.model_spec import ModelSpec, RopeSpec, read_model_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeSpec(
    theta=500000.0,
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def read(directory: Path, config: dict[str, Any], generation: object = None) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        path = directory / "generation_config.json"
        path.write_text(json.dumps(generation), encoding="utf-8")
    return read_model_spec(directory)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# ---- families -------------------------------------------------------------------------------


def test_a_llama_config_is_read_key_by_key(tmp_path: Path):
    spec = read(tmp_path, LLAMA)
    assert spec == ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=100000.0),
        tie_word_embeddings=True,
        max_position=8192,
        sliding_window=None,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        fingerprint=spec.fingerprint,
    )


def test_what_an_old_config_leaves_out_has_the_family_s_default(tmp_path: Path):
    keys = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    spec = read(tmp_path, without(LLAMA, *keys, "hidden_act", "rope_scaling"))
    assert spec.num_kv_heads == 9
    assert spec.rms_norm_eps == 1e-6
    assert spec.rope == RopeSpec(theta=10000.0)
    assert spec.hidden_act == "silu"
    assert not spec.tie_word_embeddings


def test_null_is_the_same_as_left_out(tmp_path: Path):
    spec = read(tmp_path, LLAMA | {"num_key_value_heads": None, "head_dim": None})
    assert (spec.num_kv_heads, spec.head_size) == (9, 64)


def test_qwen2_has_biases_that_its_config_does_not_mention(tmp_path: Path):
    config = without(LLAMA, "rope_scaling") | {
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 21,
    }
    spec = read(tmp_path, config)
    assert spec.attention_bias
    assert spec.sliding_window is None
    assert read(tmp_path, config | {"use_sliding_window": True}).sliding_window == 32768


def test_qwen3_states_its_head_size(tmp_path: Path):
    config = LLAMA | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
    }
    spec = read(tmp_path, config)
    assert (spec.head_size, spec.attention_bias) == (128, False)


@pytest.mark.parametrize(("window", "expected"), [(4096, 4096), (None, None)])
def test_a_mistral_window_is_always_on(tmp_path: Path, window: int | None, expected: int | None):
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    assert read(tmp_path, config).sliding_window == expected


# ---- rope -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}, LLAMA3_ROPE),
        ({"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}}, LLAMA3_ROPE),
        (
            {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(theta=10000.0, kind="linear", factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
            RopeSpec(theta=1000000.0),
        ),
        ({"rope_theta": 1000000, "rope_scaling": {}}, RopeSpec(theta=1000000.0)),
        (
            {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            RopeSpec(theta=10000.0, kind="yarn", factor=4.0),
        ),
        (
            {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            RopeSpec(theta=10000.0, rotated_share=0.5),
        ),
        (
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
            RopeSpec(theta=10000.0, rotated_share=0.25),
        ),
    ],
    ids=[
        "llama3 v4",
        "llama3 v5",
        "linear v4",
        "default v5",
        "empty v4",
        "unknown kind",
        "partial v4",
        "partial v5",
    ],
)
def test_rope_is_read_in_the_old_and_the_new_form(
    tmp_path: Path, keys: dict[str, Any], rope: RopeSpec
):
    config = without(LLAMA, "rope_theta", "rope_scaling") | keys
    assert read(tmp_path, config).rope == rope


# ---- end tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 2]}, (2, 5)),
        (None, {"eos_token_id": 7}, (7,)),
        (2, {}, (2,)),
        (2, {"eos_token_id": None}, (2,)),
    ],
)
def test_end_tokens_come_from_both_files_each_once(
    tmp_path: Path, config_eos: object, generation: object, expected: tuple[int, ...]
):
    assert (
        read(tmp_path, LLAMA | {"eos_token_id": config_eos}, generation).eos_token_ids == expected
    )


# ---- fingerprint ----------------------------------------------------------------------------


def test_the_fingerprint_changes_with_config_and_weight_files_only(tmp_path: Path):
    prints = [read(tmp_path, LLAMA).fingerprint]
    assert read(tmp_path, dict(reversed(LLAMA.items()))).fingerprint == prints[0]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read(tmp_path, LLAMA).fingerprint == prints[0]
    prints.append(read(tmp_path, LLAMA | {"rope_theta": 1}).fingerprint)
    weights = tmp_path / "model.safetensors"
    for content in (b"", b"x"):
        weights.write_bytes(content)
        prints.append(read(tmp_path, LLAMA).fingerprint)
    weights.rename(tmp_path / "model-00001-of-00001.safetensors")
    prints.append(read(tmp_path, LLAMA).fingerprint)
    assert len(set(prints)) == len(prints)


# ---- what is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named_with_its_file(tmp_path: Path, key: str):
    with pytest.raises(ModelFilesError, match=f"config.json: bad or missing key: '{key}'"):
        read(tmp_path, without(LLAMA, key))


@pytest.mark.parametrize(
    "keys",
    [
        {"vocab_size": "many"},
        {"vocab_size": None},
        {"num_attention_heads": 0},
        {"rope_scaling": [1]},
        {"rope_scaling": {"factor": "two"}},
        {"eos_token_id": "</s>"},
        {"hidden_size": [1]},
        {"architectures": {"a": 1}},
    ],
)
def test_a_value_that_makes_no_sense_names_the_file(tmp_path: Path, keys: dict[str, Any]):
    with pytest.raises(ModelFilesError, match=r"config\.json: bad or missing key"):
        read(tmp_path, LLAMA | keys)


@pytest.mark.parametrize("text", ["{", "", "\x00", "[1]", "3"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=r"config\.json: (cannot be read|expected a JSON)"):
        read_model_spec(tmp_path)


def test_a_damaged_generation_config_is_named(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"generation_config\.json: cannot be read"):
        read(tmp_path, LLAMA)


def test_a_directory_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(ModelFilesError, match=r"config\.json: no such file"):
        read_model_spec(tmp_path)


def test_a_config_without_architecture_says_so(tmp_path: Path):
    assert read(tmp_path, without(LLAMA, "architectures")).architecture == "(none given)"
    assert read(tmp_path, LLAMA | {"architectures": []}).architecture == "(none given)"
