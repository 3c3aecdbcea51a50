"""What a cluster's Ray stands on, watched: Ray itself tells nobody that it is gone.

Who still calls Ray then waits for it, for a minute or for good, and so does the whole event loop.
So nobody calls it before ``usable`` says so; ``lost`` comes first, by other means than Ray's, and
then ``end``, before anything else is done.

    PrivateHead  processes of ours: the kernel tells of their end
    JoinedHead   a port somewhere: its connection ends, and for ``patience_s`` there is no other
"""

import asyncio
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray

from pdserve.cluster.signal_guard import kill_below
from pdserve.cluster.signal_watch import SignalWatch
from pdserve.core.errors import RayLostError

WATCHED = ("gcs_server", "raylet")  # none of what Ray does goes on without them
PATIENCE_S = 20.0  # for a head that is started again; Ray gives up after 60 s
CONNECT_TIMEOUT_S = 5.0
RETRY_S = 1.0
DEAD_AFTER = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 2}


class RayHead(Protocol):
    async def lost(self) -> RayLostError:
        """Wait until Ray is gone; what died, and where its log is. To be waited for once."""

    async def usable(self) -> bool:
        """Wait until Ray can be called; False where it is gone for good."""

    def end(self) -> bool:
        """Ray is gone. True if nothing of the cluster runs any more then."""


@dataclass(slots=True, kw_only=True)
class PrivateHead:
    """``processes``: the id of each, by Ray's name for it. Linux only."""

    processes: Mapping[str, int]
    ray_logs: Path  # gone with Ray
    kept_logs: Path
    watch: SignalWatch
    _is_lost: bool = False

    async def lost(self) -> RayLostError:
        loop = asyncio.get_running_loop()
        first: asyncio.Future[str] = loop.create_future()

        def note(name: str) -> None:
            if not first.done():
                first.set_result(name)

        with ExitStack() as undo:
            for name, pid in self.processes.items():
                descriptor = os.pidfd_open(pid)
                undo.callback(os.close, descriptor)
                loop.add_reader(descriptor, note, name)
                undo.callback(loop.remove_reader, descriptor)
            name = await first
        self._is_lost = True
        pid = self.processes[name]
        kept = [str(path) for path in self._keep_logs(name)]
        where = f"its log is {', '.join(kept)}" if kept else "it has left no log"
        return RayLostError(f"Ray's {name} (process {pid}) {_end_of(pid)}; {where}")

    async def usable(self) -> bool:
        return not self._is_lost

    def end(self) -> bool:
        """All that Ray has started is below this process, orphans too: see ``private_ray``."""
        self.watch.end_soon()
        kill_below(os.getpid(), spared=(self.watch.guard_pid,))
        ray.shutdown()
        return True

    def _keep_logs(self, name: str) -> list[Path]:
        """Its logs that say anything, out of the folder that goes with Ray."""
        kept = []
        for log in sorted(self.ray_logs.glob(f"{name}.*")):
            with suppress(OSError):
                if log.stat().st_size:
                    kept.append(Path(shutil.copy(log, self.kept_logs / f"ray-{log.name}")))
        return kept


class JoinedHead:
    """``address``: where it listens, as HOST:PORT. ``log``: where the head's own log is, there."""

    def __init__(self, *, address: str, log: str, patience_s: float = PATIENCE_S) -> None:
        self._address = address
        self._log = log
        self._patience_s = patience_s
        self._is_lost = False
        self._is_settled = asyncio.Event()  # cleared: it may come back
        self._is_settled.set()

    async def lost(self) -> RayLostError:
        loop = asyncio.get_running_loop()
        gone_since_s: float | None = None
        while True:
            try:
                await self._stay_connected()
                gone_since_s = None
            except OSError as error:
                gone_since_s = loop.time() if gone_since_s is None else gone_since_s
                if loop.time() - gone_since_s >= self._patience_s:
                    self._is_lost = True
                    self._is_settled.set()
                    return RayLostError(
                        f"Ray's head at {self._address} is gone for {self._patience_s:g} s "
                        f"({error}); its log is on its host: {self._log}"
                    )
            await asyncio.sleep(RETRY_S)

    async def usable(self) -> bool:
        await self._is_settled.wait()
        return not self._is_lost

    def end(self) -> bool:
        """Ray's processes are not ours; they notice by themselves."""
        return False

    async def _stay_connected(self) -> None:
        """Until the connection ends. Raises OSError, or TimeoutError, where there is none."""
        host, _, port = self._address.rpartition(":")
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        self._is_settled.set()
        try:
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in DEAD_AFTER.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            with suppress(OSError):  # however it ends
                while await reader.read(1 << 12):
                    pass  # gRPC says its settings
        finally:
            self._is_settled.clear()
            writer.close()


def _end_of(pid: int) -> str:
    """How a child of this process has ended; whoever asks next is told too."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        ended = None
    if ended is None:
        return "has ended"
    if ended.si_code == os.CLD_EXITED:
        return f"has ended with status {ended.si_status}"
    return f"was killed by signal {ended.si_status}"
