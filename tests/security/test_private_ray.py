"""The private Ray of a cluster: who may speak to Ray runs code, so others on the host may not."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SERVE = """
import sys
from pathlib import Path
from pdserve.core.environment import set_up_private_ray
set_up_private_ray()
import ray
from pdserve.cluster.ray_session import private_ray
from pdserve.cluster.signal_watch import watched_signals
with watched_signals() as watch, private_ray(2, Path(sys.argv[1]), Path(sys.argv[1]), watch):
    answer = ray.get(ray.remote(lambda: "ours").remote())
    print(ray.get_runtime_context().gcs_address, answer, flush=True)
    sys.stdin.readline()
"""
INTRUDE = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(lambda: "EXECUTED").remote()))
"""


@pytest.fixture
def env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@pytest.fixture
def short() -> Iterator[Path]:
    """Ray's sockets have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        yield Path(folder)


def test_who_has_not_its_token_runs_no_code(short: Path, env: dict[str, str]) -> None:
    serving = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(short)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    assert serving.stdin is not None
    assert serving.stdout is not None
    try:
        address, answer = serving.stdout.readline().split()
        assert answer == "ours"
        nearby = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else it looks beyond the loopback
        guess = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        for given in (nearby, nearby | guess):
            done = subprocess.run(
                [sys.executable, "-c", INTRUDE, address],
                env=env | given,
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode != 0
            assert "EXECUTED" not in done.stdout
            assert "token" in done.stderr.lower()
    finally:
        serving.stdin.close()
        serving.stdout.close()
        serving.wait(timeout=60)
