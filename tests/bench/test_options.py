"""Options that would change nothing are refused by name."""

import argparse

import pytest

from pdserve.bench import compare, serve
from pdserve.core.errors import ConfigError


def test_compare_starts_its_own_clusters_and_takes_no_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--case", "all", "--base-url", "http://127.0.0.1:8000"])
    assert "--base-url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--dataset-path", "x.csv"], r"--dataset-path: got x\.csv, but --dataset-name is random"),
        (["--dataset-name", "trace"], "--dataset-path: a trace needs its file"),
    ],
)
def test_a_data_set_and_its_file_belong_together(options: list[str], problem: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ConfigError, match=problem):
        serve.workload_of(parser.parse_args(options), 1.0)


def test_compare_refuses_a_workload_before_it_starts_a_cluster() -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    args = parser.parse_args(["nowhere.yaml", "--case", "all", "--dataset-path", "x.csv"])
    with pytest.raises(ConfigError, match="--dataset-path"):
        compare.run(args)
