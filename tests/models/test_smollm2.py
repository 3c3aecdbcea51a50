"""The converted small model is the checkpoint that the golden answers were made from."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

Case = dict[str, Any]

pytestmark = pytest.mark.model
CASES = json.loads((Path(__file__).parent / "smollm2_cases.json").read_text())


def test_config_has_what_a_llama_loader_reads(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["rope_theta"] == 100_000
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["torch_dtype"] == "bfloat16"


def test_weights_are_bfloat16_without_a_second_copy_of_the_embedding(smollm2_dir: Path) -> None:
    with safe_open(smollm2_dir / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
    assert "lm_head.weight" not in names
    assert len(names) == 30 * 9 + 2
    assert dtypes == {"BF16"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_template_and_tokenizer_give_the_golden_prompt(smollm2_dir: Path, case: Case) -> None:
    text = case["prompt"]
    if case["kind"] == "chat":
        template = jinja2.Template((smollm2_dir / "chat_template.jinja").read_text())
        messages = [{"role": "user", "content": text}]
        text = template.render(messages=messages, add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert tokenizer.encode(text).ids == case["prompt_token_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_greedy_answers_are_the_golden_ones(smollm2_dir: Path, case: Case) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_dir, dtype=torch.float32, local_files_only=True
    )
    prompt = torch.tensor([case["prompt_token_ids"]])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=len(case["output_token_ids"]),
        do_sample=False,
    )
    assert output[0, prompt.shape[1] :].tolist() == case["output_token_ids"]
