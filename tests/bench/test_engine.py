"""The engine's bench reports what was asked for, in both forms, with ratios that are quotients."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.bench.engine import Measured, Throughput, add_arguments, header, row, run
from pdserve.bench.engine_gpu import MemoryUse
from pdserve.core.errors import ConfigError
from tests.engine.families import save_model

SMALL = ["--threads", "1", "--rounds", "1", "--prefill-lens", "3,20", "--decode-batches", "2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options)


def test_json_beside_transformers_has_a_record_for_each_size(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed("--model", str(directory), *SMALL, "--against", "transformers", "--json")
    assert run(args) == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)["results"]
    assert printed.err.splitlines()[0].split() == ["what", "size", "ms", "reference", "ratio"]
    sizes = [(r["what"], r.get("tokens"), r.get("batch")) for r in results]
    assert sizes == [("prefill", 3, None), ("prefill", 20, None), ("decode", None, 2)]
    for result in results:
        assert result["ms"] > 0
        assert result["ratio"] == pytest.approx(result["reference_ms"] / result["ms"], rel=0.02)


def test_alone_it_prints_a_table_and_no_ratio(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parsed("--model", str(directory), *SMALL, "--dtype", "bfloat16")) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["what", "size", "ms"]
    assert [columns.split()[:2] for columns in rows] == [
        ["prefill", "3"],
        ["prefill", "20"],
        ["decode", "2"],
    ]
    assert all(len(columns.split()) == 3 for columns in rows)


def test_ranks_of_a_group_are_measured_together(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    together = ["--tensor-parallel-size", "2", "--json"]
    assert run(parsed("--model", str(directory), *SMALL, *together)) == 0
    sizes = [(r["what"], r["ms"] > 0) for r in json.loads(capfd.readouterr().out)["results"]]
    assert sizes == [("prefill", True), ("prefill", True), ("decode", True)]


def test_ranks_that_fail_are_an_error_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_model("three_kv_heads", tmp_path)
    assert run(parsed("--model", str(model), *SMALL, "--tensor-parallel-size", "2")) == 1
    assert "2 ranks cannot share" in capfd.readouterr().err


def test_transformers_are_not_measured_beside_a_group(directory: Path) -> None:
    options = ["--tensor-parallel-size", "2", "--against", "transformers"]
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        run(parsed("--model", str(directory), *SMALL, *options))


def test_a_ratio_above_one_means_faster_than_the_reference() -> None:
    result = Measured(what="decode", size=8, ms=20.0, reference_ms=50.0)
    assert result.as_json() == {
        "what": "decode",
        "batch": 8,
        "ms": 20.0,
        "reference_ms": 50.0,
        "ratio": 2.5,
    }
    assert row(result).split() == ["decode", "8", "20.00", "50.00", "2.50"]


def test_many_prompts_together_are_a_row_of_their_own(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", "5", "--prompt-len", "7", "--step-tokens", "16", "--in-flight", "2"]
    none = ["--prefill-lens", "", "--decode-batches", ""]
    assert run(parsed("--model", str(directory), *SMALL, *none, *options, "--json")) == 0
    printed = capsys.readouterr()
    (result,) = json.loads(printed.out)["results"]
    assert (result["what"], result["prompts"], result["prompt_len"]) == ("throughput", 5, 7)
    assert result["tokens_per_s"] == pytest.approx(35 / result["ms"] * 1e3, rel=0.01)
    assert printed.err.splitlines()[1].split()[:2] == ["prompts", "5x7"]


def test_a_gpu_adds_what_came_first_the_gap_and_its_memory() -> None:
    prompt = Measured(what="prefill", size=512, ms=12.0, reference_ms=None, first_ms=12.5)
    step = Measured(what="decode", size=64, ms=6.0, reference_ms=None, gap_ms=0.0123)
    assert header(with_reference=False, on_gpu=True).split() == [
        "what",
        "size",
        "ms",
        "first",
        "gap",
    ]
    assert row(prompt, on_gpu=True).split() == ["prefill", "512", "12.00", "12.50", "-"]
    assert row(step, on_gpu=True).split() == ["decode", "64", "6.00", "-", "0.012"]
    assert prompt.as_json()["first_ms"] == 12.5
    assert step.as_json()["gap_ms"] == 0.0123
    use = MemoryUse(weights=15 << 30, kv=100 << 30, graphs=300 << 20, step=1 << 20)
    assert use.row().endswith("weights 15360 MiB, KV 102400 MiB, graphs 300 MiB, steps 1 MiB")
    assert use.as_json()["kv_bytes"] == 100 << 30


def test_throughput_counts_the_prompts_tokens() -> None:
    result = Throughput(num_prompts=64, prompt_len=2048, step_tokens=8192, seconds=2.0)
    assert result.tokens_per_s == 65536
    assert result.row().split()[:3] == ["prompts", "64x2048", "2000.00"]


@pytest.mark.parametrize("value", ["0", "-1", "many", "8,", "8;9"])
def test_bad_sizes_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--decode-batches={value}")
    assert "is not a whole number of 1 to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prefill-lens", "100000"], "--prefill-lens: 100001 positions"),
        (["--decode-tokens", "100000"], "--decode-prompt-len and --decode-tokens: 100128"),
        (["--prompts", "2", "--prompt-len", "100000"], "--prompt-len: 100001 positions"),
    ],
)
def test_a_length_beyond_the_model_is_refused_by_the_name_of_its_option(
    directory: Path, options: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        run(parsed("--model", str(directory), *SMALL, *options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a host without CUDA gets")
def test_cuda_where_there_is_none_is_refused_by_name(directory: Path) -> None:
    with pytest.raises(ConfigError, match="--device: 'cuda:0', but torch finds no CUDA device"):
        run(parsed("--model", str(directory), *SMALL, "--device", "cuda:0"))


def test_a_device_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--device", "gpu0")
    assert "'gpu0' is not cpu, cuda or cuda:N" in capsys.readouterr().err


def test_no_sizes_measure_nothing_of_that_kind(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL[:4], "--prefill-lens", "5", "--decode-batches", "", "--json"]
    assert run(parsed("--model", str(directory), *options)) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["what"] == "prefill"


def test_transformers_is_not_loaded_unless_asked_for() -> None:
    code = "import pdserve.bench.engine, sys; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
