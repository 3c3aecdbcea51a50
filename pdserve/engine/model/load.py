"""Making one rank's share of a model: checks the config, then builds the family's layers."""

import torch

from pdserve.core.errors import ConfigError, UnsupportedModelError
from pdserve.core.model_spec import ModelSpec
from pdserve.core.plugin import load_plugin
from pdserve.engine.attention.interface import HeadShape
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.kernels.interface import Kernels
from pdserve.engine.model import MODELS
from pdserve.engine.model.decoder import CausalLM
from pdserve.engine.model.rope import rope_table
from pdserve.engine.model.shard import Shard
from pdserve.engine.parallel import TpGroup
from pdserve.engine.weights import DummyWeights, SafetensorsWeights, Weights


def load_model(config: EngineConfig, group: TpGroup, kernels: Kernels) -> CausalLM:
    """This rank's share of the model in ``config.model_dir``.

    Raises UnsupportedModelError, ConfigError where the model cannot be cut over so many ranks, and
    ModelFilesError where a tensor is missing, unexpected or of another shape.
    """
    spec = config.spec
    check_supported(spec)
    check_divisible(spec, config.tp_size)
    weights = _weights(config)
    shard = Shard(
        spec=spec,
        weights=weights,
        group=group,
        kernels=kernels,
        kv_heads=config.layout.heads_of(config.tp_rank),
        heads=head_shape(config),
        rope_table=rope_table(
            spec.rope,
            head_size=spec.head_size,
            num_positions=config.max_model_len,
            device=torch.device(config.device),
        ),
    )
    model: CausalLM = load_plugin(MODELS[spec.architecture])(shard)
    # A tied head is sometimes saved a second time.
    weights.finish(ignored={"lm_head.weight"} if spec.tie_word_embeddings else ())
    return model


def check_supported(spec: ModelSpec) -> None:
    """Raise UnsupportedModelError, by name, for what no family here computes."""
    if spec.architecture not in MODELS:
        raise UnsupportedModelError(
            f"config.json: architecture {spec.architecture} is not supported; "
            f"known are {', '.join(sorted(MODELS))}"
        )
    if spec.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"config.json: hidden_act {spec.hidden_act!r} is not supported; known is 'silu'"
        )


def check_divisible(spec: ModelSpec, tp_size: int) -> None:
    """Raise ConfigError where heads or the MLP cannot be shared evenly (KV heads: see KvLayout)."""
    for what, size in (("attention heads", spec.num_heads), ("MLP rows", spec.intermediate_size)):
        if size % tp_size:
            raise ConfigError(
                f"tensor_parallel_size: {tp_size} ranks cannot share {size} {what} evenly; "
                f"use a divisor of {size}"
            )


def head_shape(config: EngineConfig) -> HeadShape:
    """The attention heads of one rank."""
    spec = config.spec
    return HeadShape(
        num_heads=spec.num_heads // config.tp_size,
        num_kv_heads=config.layout.heads_per_rank,
        head_size=spec.head_size,
        sliding_window=spec.sliding_window,
    )


def _weights(config: EngineConfig) -> Weights:
    device = torch.device(config.device)
    if config.load_format == "dummy":
        return DummyWeights(seed=config.seed, dtype=config.torch_dtype, device=device)
    return SafetensorsWeights(config.model_dir, dtype=config.torch_dtype, device=device)
