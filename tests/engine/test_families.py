"""Each model family computes what transformers computes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import UnsupportedModelError
from pdserve.core.model_spec import ModelSpec, RopeSpec, read_model_spec
from pdserve.engine.model import MODELS
from tests.engine.families import FAMILIES, VOCAB_SIZE, reference_greedy, reference_logprobs
from tests.engine.runs import greedy, logprobs_after, make_runner

ModelOf = Callable[[str], Path]
PROMPTS = [[random.Random(n).randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 17, 40)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, model_of: ModelOf) -> None:
    expected = reference_greedy(model_of(family), PROMPTS, num_tokens=6)
    assert greedy(make_runner(model_of(family)), PROMPTS, 6) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("backend", "kernels"), [("sdpa", "torch"), ("auto", "auto")])
def test_logprobs_are_those_of_transformers(
    family: str, backend: str, kernels: str, model_of: ModelOf
) -> None:
    runner = make_runner(model_of(family), attention_backend=backend, kernels=kernels)
    expected = reference_logprobs(model_of(family), PROMPTS[-1])
    found = logprobs_after(runner, PROMPTS[-1])
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("backend", "kernels"), [("sdpa", "torch"), ("auto", "auto")])
def test_16_bit_models_and_caches_are_near_float32(
    dtype: str, kv_dtype: str, backend: str, kernels: str, model_of: ModelOf
) -> None:
    runner = make_runner(
        model_of("llama"),
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention_backend=backend,
        kernels=kernels,
    )
    expected = reference_logprobs(model_of("llama"), PROMPTS[-1])
    difference = logprobs_after(runner, PROMPTS[-1]) - expected
    assert difference.abs().max() < 0.15  # one rounding is 0.4 %, logits reach 4


def unsupported(spec: ModelSpec) -> list[tuple[ModelSpec, str]]:
    return [
        (replace(spec, architecture="GPT2LMHeadModel"), ", ".join(sorted(MODELS))),
        (replace(spec, hidden_act="gelu"), "'gelu'"),
        (replace(spec, rope=RopeSpec(theta=1e4, kind="yarn")), "'yarn'"),
        (replace(spec, rope=RopeSpec(theta=1e4, rotated_share=0.5)), "partial_rotary_factor 0.5"),
        (replace(spec, sliding_window=128), "sliding_window 128"),
        (replace(spec, sliding_window=128, architecture="Qwen2ForCausalLM"), "sliding_window 128"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_what_no_family_computes_is_refused_by_name(case: int, model_of: ModelOf) -> None:
    spec, named = unsupported(read_model_spec(model_of("llama")))[case]
    with pytest.raises(UnsupportedModelError, match=named):
        make_runner(model_of("llama"), spec=spec)
