"""The loss of what Ray stands on is noticed and named, by other means than Ray's."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cluster.ray_head import JoinedHead, PrivateHead
from pdserve.cluster.signal_guard import kill_below
from pdserve.cluster.signal_watch import SignalWatch
from tests.cluster.processes import is_running, wait_until_gone

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    """Of a guard that is not there."""
    ours, guards = socket.socketpair()
    with ours, guards:
        yield SignalWatch(ours, os.getpid())


@pytest.fixture
def processes() -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    started = {name: subprocess.Popen(SLEEP) for name in ("gcs_server", "raylet")}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
async def test_the_death_of_a_process_of_ours_is_named_with_its_log(
    name: str,
    watch: SignalWatch,
    processes: dict[str, "subprocess.Popen[bytes]"],
    tmp_path: Path,
) -> None:
    ray_logs, kept_logs = tmp_path / "ray", tmp_path / "kept"
    ray_logs.mkdir()
    kept_logs.mkdir()
    for each in processes:
        (ray_logs / f"{each}.err").write_text(f"{each} is unwell\n")
        (ray_logs / f"{each}.out").touch()
    pids = {each: process.pid for each, process in processes.items()}
    head = PrivateHead(processes=pids, ray_logs=ray_logs, kept_logs=kept_logs, watch=watch)
    lost = asyncio.create_task(head.lost())
    await asyncio.sleep(0)
    processes[name].kill()
    async with asyncio.timeout(20):
        assert await head.usable()
        error = await lost
    assert not await head.usable()
    kept = kept_logs / f"ray-{name}.err"
    assert str(error) == (
        f"Ray's {name} (process {pids[name]}) was killed by signal {signal.SIGKILL:d}; "
        f"its log is {kept}"
    )
    assert kept.read_text() == f"{name} is unwell\n"
    assert [path.name for path in kept_logs.iterdir()] == [kept.name]


class Port:
    """A head elsewhere: who connects is let in and told nothing."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.was_called = asyncio.Event()
        self._connections: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Port":
        self._server = await asyncio.start_server(self._take, "127.0.0.1", self.number)
        self.number = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.close()
        await self._server.wait_closed()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.append(writer)
        self.was_called.set()


async def test_a_head_elsewhere_that_comes_back_in_time_is_not_lost() -> None:
    async with asyncio.timeout(30):
        async with Port() as before:
            head = JoinedHead(address=f"127.0.0.1:{before.number}", log="", patience_s=60)
            lost = asyncio.create_task(head.lost())
            await before.was_called.wait()
            assert await head.usable()
        usable = asyncio.create_task(head.usable())
        async with Port(before.number) as after:
            await after.was_called.wait()
            assert await usable
            assert not lost.done()
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)


async def test_a_head_elsewhere_that_stays_away_is_named_with_its_log() -> None:
    async with asyncio.timeout(30):
        async with Port() as port:
            address = f"127.0.0.1:{port.number}"
            head = JoinedHead(address=address, log="gcs_server.out", patience_s=0.5)
            lost = asyncio.create_task(head.lost())
            await port.was_called.wait()
        error = str(await lost)
        assert not await head.usable()
    assert error.startswith(f"Ray's head at {address} is gone for 0.5 s (")
    assert error.endswith("; its log is on its host: gcs_server.out")


def test_what_is_spared_outlives_the_others() -> None:
    code = f"""
import os, subprocess, sys
from pdserve.cluster.signal_guard import kill_below
spared, other = (subprocess.Popen({SLEEP!r}) for _ in range(2))
print(spared.pid, other.pid, kill_below(os.getpid(), spared=(spared.pid,)), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        spared, other, num_killed = map(int, parent.stdout.readline().split())
        assert num_killed == 1
        assert wait_until_gone({other: "other"}, timeout_s=10) == {}
        assert is_running(spared)
        assert kill_below(parent.pid) == 1
