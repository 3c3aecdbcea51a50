"""Two ranks on two GPUs compute what one computes, each on its own device."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.engine import add_arguments, run
from tests.engine.families import reference_greedy, reference_logprobs
from tests.gpu.tp_rank import NUM_TOKENS, PROMPTS

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

ModelOf = Callable[[str], Path]
RANK_TIMEOUT_S = 200
LOG_LEN = 1500  # of each rank, to be shown
WITH_GRAPHS_OF_CHUNKS: dict[
    str, Any
] = {  # in 16 bits another size of a product may round another way
    "dtype": "float32",
    "kv_dtype": "bfloat16",
    "attention_backend": "flash_attn",
}


def run_ranks(
    model_dir: Path,
    size: int,
    tmp_path: Path,
    *,
    without_peer_memory: Collection[int] = (),
    **changes,
) -> list[dict[str, Any]]:
    """What each rank found; ``changes`` of its engine's config."""
    files = [tmp_path / f"rank{rank}of{size}.pt" for rank in range(size)]
    logs = [file.with_suffix(".log") for file in files]
    store = tmp_path / f"store{size}"
    store.unlink(missing_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    for number, (file, log) in enumerate(zip(files, logs, strict=True)):
        command = [sys.executable, "-m", "tests.gpu.tp_rank", str(model_dir), str(store)]
        command += [str(number), str(size), str(file), json.dumps(changes)]
        command += ["--without-peer-memory"] if number in without_peer_memory else []
        with log.open("w") as errors:
            ranks.append(subprocess.Popen(command, stderr=errors))
    try:
        ended = [rank.wait(RANK_TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ended == [0] * size, "\n".join(log.read_text()[-LOG_LEN:] for log in logs)
    return [torch.load(file) for file in files]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "one_kv_head"])
def test_float32_ranks_together_are_transformers(
    family: str, model_of: ModelOf, tmp_path: Path
) -> None:
    expected = reference_logprobs(model_of(family), PROMPTS[2])
    tokens = reference_greedy(model_of(family), PROMPTS, NUM_TOKENS)
    first, second = run_ranks(model_of(family), 2, tmp_path)
    for rank, found in enumerate((first, second)):
        torch.testing.assert_close(found["logprobs"], expected, atol=5e-5, rtol=1e-5)
        assert found["tokens"] == tokens
        assert found["devices"] == (rank, rank)
        assert found["used_elsewhere"] == 0
        assert found["group"] == "PeerTpGroup"
        assert found["has_graphs"]
    assert torch.equal(first["logprobs"], second["logprobs"])  # ranks sample on their own
    assert first["drawn"] == second["drawn"]


def test_ranks_hold_as_many_blocks_as_fit_on_each(model_of: ModelOf, tmp_path: Path) -> None:
    first, second = run_ranks(model_of("llama"), 2, tmp_path, gpu_memory_utilization=0.2)
    assert first["num_blocks"] == second["num_blocks"] > 0


def test_tokens_of_ranks_do_not_depend_on_graphs(model_of: ModelOf, tmp_path: Path) -> None:
    with_graphs, without = (
        run_ranks(model_of("llama"), 2, tmp_path, cuda_graphs=graphs, **WITH_GRAPHS_OF_CHUNKS)
        for graphs in (True, False)
    )
    assert [found["has_graphs"] for found in (*with_graphs, *without)] == [True] * 2 + [False] * 2
    for what in ("tokens", "drawn"):
        assert all(found[what] == without[0][what] for found in (*with_graphs, *without))


def test_ranks_use_nccl_where_one_of_them_has_no_peer_memory(
    model_of: ModelOf, tmp_path: Path
) -> None:
    tokens = reference_greedy(model_of("llama"), PROMPTS, NUM_TOKENS)
    for found in run_ranks(model_of("llama"), 2, tmp_path, without_peer_memory=[1]):
        assert found["group"] == "ProcessTpGroup"
        assert not found["has_graphs"]
        assert found["tokens"] == tokens


def test_bfloat16_ranks_are_near_one_rank_and_draw_the_same_dummy_weights(
    model_of: ModelOf, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "load_format": "dummy"}
    (alone,) = run_ranks(model_of("llama"), 1, tmp_path, **changes)
    both = run_ranks(model_of("llama"), 2, tmp_path, **changes)
    for found in both:
        assert (found["logprobs"] - alone["logprobs"]).abs().max() < 0.15
    assert torch.equal(both[0]["logprobs"], both[1]["logprobs"])
    assert both[0]["tokens"] == both[1]["tokens"]


def test_the_engines_bench_measures_ranks_together(
    model_of: ModelOf, capfd: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--model", str(model_of("llama")), "--device", "cuda:0", "--dtype", "bfloat16"]
    sizes = ["--prefill-lens", "20", "--decode-batches", "2", "--decode-prompt-len", "20"]
    together = ["--tensor-parallel-size", "2", "--in-flight", "2", "--rounds", "1", "--json"]
    assert run(parser.parse_args([*options, *sizes, *together])) == 0
    prefill, decode = json.loads(capfd.readouterr().out)["results"]
    assert prefill["ms"] > 0
    assert decode["gap_ms"] > 0
