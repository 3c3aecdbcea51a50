"""Two ranks on two GPUs over NCCL compute what one computes, each on its own device."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.families import reference_greedy, reference_logprobs
from tests.gpu.tp_rank import NUM_TOKENS, PROMPTS

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

ModelOf = Callable[[str], Path]
RANK_TIMEOUT_S = 200


def run_ranks(
    model_dir: Path, size: int, tmp_path: Path, *, dtype: str, load_format: str = "auto"
) -> list[dict[str, Any]]:
    files = [tmp_path / f"rank{rank}of{size}.pt" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.gpu.tp_rank"),
                *(str(model_dir), str(tmp_path / f"store{size}"), str(rank), str(size)),
                *(dtype, load_format, str(file)),
            ]
        )
        for rank, file in enumerate(files)
    ]
    try:
        assert [rank.wait(RANK_TIMEOUT_S) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(file) for file in files]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "one_kv_head"])
def test_float32_ranks_together_are_transformers(
    family: str, model_of: ModelOf, tmp_path: Path
) -> None:
    expected = reference_logprobs(model_of(family), PROMPTS[2])
    tokens = reference_greedy(model_of(family), PROMPTS, NUM_TOKENS)
    first, second = run_ranks(model_of(family), 2, tmp_path, dtype="float32")
    for rank, found in enumerate((first, second)):
        torch.testing.assert_close(found["logprobs"], expected, atol=5e-5, rtol=1e-5)
        assert found["tokens"] == tokens
        assert found["devices"] == (rank, rank)
        assert found["used_elsewhere"] == 0
    assert torch.equal(first["logprobs"], second["logprobs"])  # ranks sample on their own
    assert first["num_blocks"] == second["num_blocks"] > 0


def test_bfloat16_ranks_are_near_one_rank_and_draw_the_same_dummy_weights(
    model_of: ModelOf, tmp_path: Path
) -> None:
    (alone,) = run_ranks(model_of("llama"), 1, tmp_path, dtype="bfloat16", load_format="dummy")
    both = run_ranks(model_of("llama"), 2, tmp_path, dtype="bfloat16", load_format="dummy")
    for found in both:
        assert (found["logprobs"] - alone["logprobs"]).abs().max() < 0.15
    assert torch.equal(both[0]["logprobs"], both[1]["logprobs"])
    assert both[0]["tokens"] == both[1]["tokens"]
