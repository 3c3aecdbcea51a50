"""Run files: found while their owner lives, gone afterwards whatever ended it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cluster.run_file import RunRecord, claim, running
from pdserve.core.errors import ConfigError

OWNER = """
import sys, time
from pathlib import Path
from pdserve.cluster.run_file import RunRecord, claim
folder, leftover = map(Path, sys.argv[1:])
held = claim(folder, "one")
left = (str(leftover),)
held.publish(
    RunRecord(name="one", pid=1, log_dir="l", run_token="t", admin_token="a", leftovers=left)
)
print("published", flush=True)
time.sleep(60)
"""


def record(name: str, *leftovers: Path) -> RunRecord:
    return RunRecord(
        name=name,
        pid=os.getpid(),
        http_url="http://127.0.0.1:8000",
        nodes={"prefill-0": "prefill"},
        log_dir="logs",
        run_token="abc",
        admin_token="secret",
        leftovers=tuple(map(str, leftovers)),
    )


def test_a_published_cluster_is_found_until_it_is_released(tmp_path: Path) -> None:
    held = claim(tmp_path, "one")
    assert running(tmp_path) == []
    held.publish(record("one"))
    assert running(tmp_path) == [record("one")]
    held.release()
    assert running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_name_can_be_claimed_once(tmp_path: Path) -> None:
    held = claim(tmp_path, "one")
    with pytest.raises(ConfigError, match="'one' runs already"):
        claim(tmp_path, "one")
    held.release()
    claim(tmp_path, "one").release()


def test_clusters_without_a_name_get_different_ones(tmp_path: Path) -> None:
    held = [claim(tmp_path, None) for _ in range(3)]
    assert [each.name for each in held] == ["pdserve", "pdserve-2", "pdserve-3"]
    for each in held:
        each.release()


@pytest.mark.parametrize("name", ["../one", "", "a/b", ".hidden"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        claim(tmp_path / "run", name)


def test_several_clusters_are_listed_by_name(tmp_path: Path) -> None:
    held = [claim(tmp_path, name) for name in ("b", "a")]
    for each in held:
        each.publish(record(each.name))
    assert [found.name for found in running(tmp_path)] == ["a", "b"]
    for each in held:
        each.release()


def test_a_cluster_of_another_host_that_shares_the_cache_is_not_found(tmp_path: Path) -> None:
    here, there = claim(tmp_path, None), claim(tmp_path, None)
    here.publish(record(here.name))
    there.publish(replace(record(there.name), host="another"))
    assert [found.name for found in running(tmp_path)] == [here.name]
    assert (tmp_path / f"{there.name}.json").exists()
    for each in (here, there):
        each.release()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=f"PDSERVE_CACHE: .* '{tmp_path}/cache/run'"):
        claim(tmp_path / "cache" / "run", None)


def test_what_a_killed_owner_left_is_removed(tmp_path: Path) -> None:
    folder, leftover = tmp_path / "run", tmp_path / "ray"
    (leftover / "session").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(leftover)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"published\n"
        assert [found.name for found in running(folder)] == ["one"]
        assert leftover.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=10)
    assert running(folder) == []
    assert not leftover.exists()
    assert list(folder.iterdir()) == []


def test_a_name_whose_owner_was_killed_can_be_claimed_again(tmp_path: Path) -> None:
    leftover = tmp_path / "ray"
    leftover.mkdir()
    (tmp_path / "one.lock").touch()
    stale = claim(tmp_path, "two")
    stale.publish(record("one", leftover))
    (tmp_path / "two.json").rename(tmp_path / "one.json")
    claim(tmp_path, "one").release()
    assert not leftover.exists()
    stale.release()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "one"}'])
def test_a_run_file_that_cannot_be_read_is_passed_over(tmp_path: Path, text: str) -> None:
    held = claim(tmp_path, "one")
    (tmp_path / "one.json").write_text(text)
    assert running(tmp_path) == []
    held.release()


def test_a_run_file_is_its_owners_alone(tmp_path: Path) -> None:
    held = claim(tmp_path, "one")
    held.publish(record("one"))
    held.publish(record("one"))
    assert (tmp_path / "one.json").stat().st_mode & 0o777 == 0o600
    held.release()
