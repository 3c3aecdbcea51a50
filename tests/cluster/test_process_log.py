"""Logs of a run, and of the one before it."""

from pathlib import Path

import pytest

from pdserve.cluster.process_log import set_aside
from pdserve.cluster.run_file import claim
from pdserve.core.errors import ConfigError


def test_a_start_keeps_the_logs_of_the_run_before_and_no_older_ones(tmp_path: Path) -> None:
    logs = tmp_path / "prod.v1"
    for run in ("first", "second", "third"):
        set_aside(logs)
        logs.mkdir()
        (logs / f"{run}.log").write_text(run)
    assert [path.name for path in logs.iterdir()] == ["third.log"]
    previous = tmp_path / "prod.v1.previous"
    assert [path.name for path in previous.iterdir()] == ["second.log"]


@pytest.mark.parametrize("name", ["pdserve", "prod.v1"])
def test_a_first_start_has_nothing_to_keep(tmp_path: Path, name: str) -> None:
    set_aside(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_no_cluster_is_named_like_kept_logs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--name: 'prod.previous'"):
        claim(tmp_path, "prod.previous")
