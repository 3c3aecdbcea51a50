"""A cluster that a measurement starts for itself: `pdserve serve` as a process, and those below."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pdserve.bench.termination import interrupted_by_sigterm
from pdserve.cluster.admin import Target, get_status
from pdserve.cluster.run_file import run_folder, running
from pdserve.core.errors import NoNodeError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process of a node that can be killed."""

    node: str
    part: str  # "front" or "rank N"
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What all processes of the cluster hold."""

    rss_bytes: int
    num_fds: int
    num_processes: int


class OwnCluster:
    """A cluster that runs below this process."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.url = url
        self._process = process

    def status(self) -> dict[str, Any]:
        """Raises NoNodeError where the router does not answer."""
        return get_status(Target(url=self.url, token=None))

    def victims(self) -> list[Victim]:
        """Fronts and ranks of all nodes that are connected."""
        listeners = {
            connection.laddr.port: connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.laddr and connection.status == psutil.CONN_LISTEN and connection.pid
        }
        found = []
        connected = [node for node in self.status()["nodes"] if node["connected"]]
        for node in connected:
            port = int(str(node["address"]).rpartition(":")[2])
            if port in listeners:
                found.append(Victim(node=node["name"], part="front", pid=listeners[port]))
            found += [
                Victim(node=node["name"], part=f"rank {rank['rank']}", pid=rank["pid"])
                for rank in node["ranks"]
            ]
        return found

    def footprint(self) -> Footprint:
        """Processes that end meanwhile count as nothing."""
        rss_bytes = num_fds = count = 0
        for process in self._processes():
            try:
                with process.oneshot():
                    rss_bytes += process.memory_info().rss
                    num_fds += process.num_fds()
            except psutil.Error:
                continue
            count += 1
        return Footprint(rss_bytes=rss_bytes, num_fds=num_fds, num_processes=count)

    def stop(self) -> tuple[int | None, int]:
        """End the cluster: its exit status (None: it had to be killed), and how many of its
        processes outlived it.
        """
        processes = self._processes()
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = None
        _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S / 4)
        return status, len(alive)

    def _processes(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextmanager
def own_cluster(
    cluster_yaml: Path | None, settings: Sequence[str], log: Path
) -> Iterator[OwnCluster]:
    """`pdserve serve` on free ports, ready, inside the block. Raises NoNodeError."""
    name = f"bench-{time.time_ns() % 10**9}"
    given = [] if cluster_yaml is None else [str(cluster_yaml)]
    options = [f"--set={setting}" for setting in ("router.http_port=0", "router.grpc_port=0")]
    options += [f"--set={setting}" for setting in settings]
    command = [sys.executable, "-m", "pdserve.cli", "serve", *given, "--name", name, *options]
    with interrupted_by_sigterm(), log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield OwnCluster(process, _url_of(name, process, log))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_TIMEOUT_S)


def _url_of(name: str, process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        for record in running(run_folder()):
            if record.name == name and record.http_url is not None:
                return record.http_url
        time.sleep(LOOK_EVERY_S)  # another process writes the run file
    process.kill()
    raise NoNodeError(f"the cluster did not start; it printed:\n{log.read_text(errors='replace')}")
