"""Signals to `pdserve serve` before it serves: it ends, and nothing of it stays."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.processes import descendants, wait_until_gone
from tests.cluster.served import ANY_PORT, PDSERVE
from tests.faults.tiny_model import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_a_second_signal_ends_it_while_ray_hangs(tmp_path: Path) -> None:
    settings = {
        **ANY_PORT,
        "model.source": make_tiny_model(tmp_path / "model"),
        "model.load_format": "dummy",
    }
    command = [*PDSERVE, "serve", *(f"--set={key}={value}" for key, value in settings.items())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as serving:
        store = wait_for_child(serving.pid, "gcs_server")
        os.kill(store, signal.SIGSTOP)
        serving.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            serving.wait(timeout=1)
        below = descendants(serving.pid)
        assert store in below
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=10) == -signal.SIGKILL
    assert wait_until_gone(below, timeout_s=10) == {}


def wait_for_child(pid: int, word: str) -> int:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for child, name in descendants(pid).items():
            if word in name:
                return child
        time.sleep(0.02)
    raise TimeoutError(f"no process of {pid} is called {word}")
