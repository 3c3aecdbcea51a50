"""`pdserve serve` through Ray on two GPUs: prefill and decode node, and many callers at once."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.cluster.golden import NEAR_TIE
from tests.cluster.served import Served, served
from tests.text.tiny_models import byte_level, save

pytestmark = [pytest.mark.multigpu, pytest.mark.ray, pytest.mark.timeout(400)]

NUM_REQUESTS = 256
NUM_PROMPTS = 32  # that the requests share
LONGEST = 1500
VOCAB_SIZE = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt with what transformers says to it."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]  # between the best two logits


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, large enough for prompts in chunks and small enough for float32."""
    directory = save(tmp_path_factory.mktemp("llama"), byte_level(VOCAB_SIZE))
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE + 2,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        weight.data.normal_(centre, 0.1 if weight.dim() == 1 else weight.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def cases(model_dir: Path) -> list[Case]:
    chance = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to("cuda:0")
    lengths = [1, 15, 16, 17, *(chance.randrange(1, LONGEST) for _ in range(NUM_PROMPTS - 4))]
    made = []
    for length in lengths:
        prompt = [chance.randrange(3, VOCAB_SIZE) for _ in range(length)]
        made.append(reference(model, prompt, chance.randrange(4, 24)))
    del model
    torch.cuda.empty_cache()
    return made


@torch.inference_mode()
def reference(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> Case:
    """Greedy, the cache left out: each token from all before it."""
    tokens, margins = list(prompt), []
    for _ in range(num_tokens):
        best = model(torch.tensor([tokens], device="cuda:0")).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return Case(prompt=prompt, tokens=tokens[len(prompt) :], margins=margins)


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc", "auto"])
def test_256_callers_at_once_get_the_right_answers_and_every_block_comes_back(
    transport: str, model_dir: Path, cases: list[Case]
) -> None:
    settings = {
        "model.source": model_dir,
        "model.dtype": "float32",
        "prefill.resources.num_gpus": 1,
        "decode.resources.num_gpus": 1,
        "prefill.gpu_memory_utilization": 0.2,
        "decode.gpu_memory_utilization": 0.2,
        "prefill.max_num_batched_tokens": 1024,
        "kv_transfer.transport": transport,
        "router.local_prefill_below": 16,
    }
    with served(settings) as cluster:
        before = cluster.wait_until_idle()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            asked = [cases[i % len(cases)] for i in range(NUM_REQUESTS)]
            problems = list(pool.map(lambda case: ask(cluster, case), asked))
        after = cluster.wait_until_idle()
    assert [problem for problem in problems if problem] == []
    blocks = [(node["name"], node["free_blocks"]) for node in before["nodes"]]
    assert [(node["name"], node["free_blocks"]) for node in after["nodes"]] == blocks


def ask(cluster: Served, case: Case) -> str | None:
    """What is wrong with the answer; from a near tie on both tokens are right."""
    body = {
        "prompt": case.prompt,
        "max_tokens": len(case.tokens),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    got = cluster.post("/v1/completions", body)["choices"][0]["token_ids"]
    for i, (token, margin) in enumerate(zip(case.tokens, case.margins, strict=True)):
        if margin < NEAR_TIE:
            return None
        if got[i : i + 1] != [token]:
            return f"{len(case.prompt)} tokens, output {i}: want {token}, got {got[i : i + 1]}"
    return None if len(got) == len(case.tokens) else f"{len(got)} tokens"
