"""Which server a bench measures, and whom it trusts there."""

import argparse
import os
from pathlib import Path

import pytest

from pdserve.bench.server import add_server_arguments, server_of
from pdserve.cluster.run_file import RunRecord, claim, run_folder
from pdserve.core.errors import ConfigError, NoNodeError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return parser.parse_args(words)


def test_without_an_address_it_is_the_cluster_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    with pytest.raises(NoNodeError, match="no cluster runs"):
        server_of(parsed())
    claims = [claim(run_folder(), name) for name in ("one", "two")]
    for port, held in enumerate(claims, 9001):
        held.publish(
            RunRecord(
                name=held.name,
                pid=os.getpid(),
                http_url=f"http://127.0.0.1:{port}",
                log_dir="",
                run_token="",
                admin_token="",
                leftovers=(),
            )
        )
    with pytest.raises(ConfigError, match="choose one by --name"):
        server_of(parsed())
    assert server_of(parsed("--name", "two")).url == "http://127.0.0.1:9002"
    assert "http://127.0.0.1:9002" in capsys.readouterr().err
    for held in claims:
        held.release()


def test_a_ca_that_is_none_is_refused_by_its_option() -> None:
    with pytest.raises(ConfigError, match="--ca: nowhere"):
        server_of(parsed("--base-url", "https://host", "--ca", "nowhere"))
