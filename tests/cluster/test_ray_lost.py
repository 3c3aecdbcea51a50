"""The Ray under a cluster dies: the cluster ends by name within seconds, and nothing stays."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.processes import descendants, wait_until_gone
from tests.cluster.served import ANY_PORT, PDSERVE, served
from tests.cluster.test_stopping import wait_for_child
from tests.faults.tiny_model import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

END_TIMEOUT_S = 30.0  # on a busy machine; it takes a second or two
FAILED = 1


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    model = make_tiny_model(tmp_path / "model")
    return {"model.source": model, "model.load_format": "dummy"}


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_private_ray_that_dies_ends_the_cluster_by_name(
    name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    with served(settings) as cluster:
        below = descendants(cluster.process.pid)
        dies = find(below, name)
        os.kill(dies, signal.SIGKILL)
        assert cluster.process.wait(timeout=END_TIMEOUT_S) == FAILED
        (log,) = (tmp_path / "cache/logs").glob(f"*/ray-{name}.out")
        cluster.wait_for(
            rf".*Ray's {name} \(process {dies}\) was killed by signal 9; its log is .*{log}",
            END_TIMEOUT_S,
        )
    assert wait_until_gone(below, timeout_s=10) == {}
    assert not list((tmp_path / "cache/run").glob("*.json"))
    for address in (urlsplit(cluster.http_url).netloc, cluster.grpc_address):
        assert not listens(address)


def test_a_private_ray_that_dies_while_nodes_start_ends_the_start(
    settings: dict[str, object],
) -> None:
    words = [f"--set={key}={value}" for key, value in {**ANY_PORT, **settings}.items()]
    with subprocess.Popen(
        [*PDSERVE, "serve", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as serving:
        wait_for_child(serving.pid, "Actor")  # a front or a rank
        below = descendants(serving.pid)
        os.kill(find(below, "gcs_server"), signal.SIGKILL)
        assert serving.wait(timeout=END_TIMEOUT_S) == FAILED
        assert serving.stderr is not None
        assert "Ray's gcs_server" in serving.stderr.read()
    assert wait_until_gone(below, timeout_s=10) == {}


@dataclass
class Head:
    """Where it listens, its first process and all that it has started."""

    address: str
    pid: int
    processes: dict[int, str] = field(default_factory=dict)

    def note_processes(self) -> None:
        """Before it ends: orphans are not below it."""
        self.processes |= descendants(self.pid)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    """A Ray cluster of this host alone."""
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        words = f"start --head --block --node-ip-address=127.0.0.1 --port={port} --num-cpus=32"
        more = f"--include-dashboard=false --object-store-memory={80 << 20} --temp-dir={folder}"
        monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # else not on the loopback
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        command = [str(Path(PDSERVE[0]).parent / "ray"), *words.split(), *more.split()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as ray:
            wait_for_child(ray.pid, "raylet")
            head = Head(address=f"127.0.0.1:{port}", pid=ray.pid)
            head.note_processes()
            yield head
            head.note_processes()
            ray.kill()
            for pid in wait_until_gone(head.processes, timeout_s=0):
                os.kill(pid, signal.SIGKILL)


def test_a_joined_ray_whose_head_is_gone_ends_the_cluster_by_name(
    settings: dict[str, object], head: Head
) -> None:
    with served({**settings, "ray.address": head.address}) as cluster:
        head.note_processes()
        os.kill(find(head.processes, "gcs_server"), signal.SIGKILL)
        assert cluster.process.wait(timeout=END_TIMEOUT_S + 60) == FAILED
        cluster.wait_for(rf".*Ray's head at {head.address} is gone for 20 s", END_TIMEOUT_S)
    for listening in (urlsplit(cluster.http_url).netloc, cluster.grpc_address):
        assert not listens(listening)


def find(processes: dict[int, str], name: str) -> int:
    """The one whose program has this name."""
    found = [pid for pid, line in processes.items() if Path(line.split()[0]).name == name]
    (pid,) = found
    return pid


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0
