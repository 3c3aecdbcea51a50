"""A Llama of two small layers with random weights, as a rank is told about it."""

from pathlib import Path

from pdserve.core.model_spec import ModelSpec, RopeSpec
from pdserve.engine.engine_config import EngineConfig

VOCAB_SIZE = 97
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0),
    tie_word_embeddings=True,
    max_position=256,
    sliding_window=None,
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=1,
    eos_token_ids=(2,),
    fingerprint="tiny",
)


def tiny_engine_config(model_dir: Path, *, tp_size: int = 1, tp_rank: int = 0) -> EngineConfig:
    return EngineConfig(
        model_dir=model_dir,
        spec=SPEC,
        load_format="dummy",
        device="cpu",
        dtype="float32",
        tp_size=tp_size,
        tp_rank=tp_rank,
        block_size=4,
        kv_dtype="float32",
        kv_cache_bytes=1 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_threads=1,
    )
