"""On a GPU the engine's bench also tells of first prompts, gaps between steps, and memory."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.bench.engine import add_arguments, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_json_has_first_prompts_gaps_and_memory(
    model_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--model", str(model_of("llama")), "--device", "cuda:0", "--dtype", "bfloat16"]
    sizes = ["--prefill-lens", "20", "--decode-batches", "2", "--decode-prompt-len", "20"]
    many = ["--prompts", "3", "--prompt-len", "30", "--step-tokens", "64", "--in-flight", "2"]
    assert run(parser.parse_args([*options, *sizes, *many, "--rounds", "1", "--json"])) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    prefill, decode, together = record["results"]
    assert prefill["first_ms"] > 0
    assert decode["gap_ms"] >= 0  # under a profiler, and so small a model has few kernels
    assert together["tokens_per_s"] > 0
    assert set(record["memory"]) == {"weights_bytes", "kv_bytes", "graphs_bytes", "step_bytes"}
    assert printed.err.splitlines()[0].split() == ["what", "size", "ms", "first", "gap"]
