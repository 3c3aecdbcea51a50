"""A real cluster as a test sees it: `pdserve serve` as a process, called over its public faces."""

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

PDSERVE = (sys.executable, "-m", "pdserve.cli")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 15.0
ANY_PORT = {"router.http_port": 0, "router.grpc_port": 0}


class ServeFailedError(Exception):
    """The cluster did not do what was asked; the message holds what it printed."""


class Served:
    """A cluster that serves. ``lines`` is what it printed so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http_url = ""
        self.grpc_address = ""

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first line from now on that matches. Raises ServeFailedError where none comes."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._fresh.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                printed = "\n".join(self.lines)
                raise ServeFailedError(f"no line like {pattern!r} came:\n{printed}")
            if match := re.match(pattern, line):
                return match

    def status(self) -> dict[str, Any]:
        """What `pdserve status --json` prints."""
        done = subprocess.run(
            [*PDSERVE, "status", "--url", self.http_url, "--json"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        status = json.loads(done.stdout)
        assert isinstance(status, dict)
        return status

    def wait_until_idle(self) -> dict[str, Any]:
        """The status once all is ready, nothing runs and every block is free.

        Nodes report once a second. Raises ServeFailedError where it takes long.
        """
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            status = self.status()
            if status["state"] == "ready" and all(map(_is_idle, status["nodes"])):
                return status
            if time.monotonic() > deadline_s:
                raise ServeFailedError(f"not idle: {json.dumps(status, indent=2)}")
            time.sleep(0.5)

    def post(self, path: str, body: Mapping[str, object], timeout_s: float = 120) -> dict[str, Any]:
        """The JSON answer to a good request."""
        request = urllib.request.Request(
            self.http_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = json.load(response)
        assert isinstance(answer, dict)
        return answer

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(timeout=STOP_TIMEOUT_S)
        self._reader.join(timeout=STOP_TIMEOUT_S)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.lines.append(line.rstrip("\n"))
                self._fresh.put(self.lines[-1])
        self._fresh.put(None)


def _is_idle(node: dict[str, Any]) -> bool:
    all_free = bool(node["total_blocks"]) and node["free_blocks"] == node["total_blocks"]
    return all_free and node["running"] == node["waiting"] == 0


@contextmanager
def served(overrides: Mapping[str, object], *words: str) -> Iterator[Served]:
    """`pdserve serve` on free ports inside the block, ready."""
    settings = [f"--set={key}={value}" for key, value in {**ANY_PORT, **overrides}.items()]
    process = subprocess.Popen(
        [*PDSERVE, "serve", *settings, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    cluster = Served(process)
    try:
        router = cluster.wait_for(r"router +HTTP (https?://\S+), gRPC (\S+)", START_TIMEOUT_S)
        cluster.http_url, cluster.grpc_address = router[1], router[2]
        cluster.wait_for("ready", START_TIMEOUT_S)
        yield cluster
    finally:
        try:
            cluster.stop()
        except subprocess.TimeoutExpired:
            process.kill()
            raise
