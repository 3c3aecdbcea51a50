"""Signals to `pdserve serve`: it ends, and nothing of it stays."""

import os
import pty
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
    with subprocess.Popen(serve_command(tmp_path), stdout=subprocess.DEVNULL) as serving:
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


def test_a_terminal_that_goes_away_ends_it_in_order(tmp_path: Path) -> None:
    command = serve_command(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(command[0], command)
    heard = b""
    while b"\nrouter" not in heard:
        heard += os.read(terminal, 4096)
    below = descendants(pid)
    assert "gcs_server" in " ".join(below.values())
    os.close(terminal)  # SIGHUP; what it writes from now on fails
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert wait_until_gone(below, timeout_s=10) == {}


def serve_command(folder: Path) -> list[str]:
    settings = {
        **ANY_PORT,
        "model.source": make_tiny_model(folder / "model"),
        "model.load_format": "dummy",
    }
    return [*PDSERVE, "serve", *(f"--set={key}={value}" for key, value in settings.items())]


def wait_for_child(pid: int, word: str) -> int:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for child, name in descendants(pid).items():
            if word in name:
                return child
        time.sleep(0.02)
    raise TimeoutError(f"no process of {pid} is called {word}")
