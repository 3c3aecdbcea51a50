"""Two hosts on this machine: network namespaces joined by a wire that can be cut, a Ray in each.

Needs root and `ip`. They share the file system and /dev/shm, which no node uses across hosts; where
the second host is to see something else at a path, that is mounted there for its processes alone.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

IP = shutil.which("ip")
POSSIBLE = os.geteuid() == 0 and IP is not None
INTERFACE = "eth0"
RAY_PORT = 6379
RAY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0
NOTHING_ELSE: Mapping[Path, Path] = {}
OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of them."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The same command, inside this host's network."""
        assert IP is not None
        return [IP, "netns", "exec", self.namespace, *words]

    def ask(self, code: str, *arguments: str, timeout_s: float) -> str:
        """What a Python program prints that runs on this host."""
        done = subprocess.run(
            self.command(sys.executable, "-c", code, *arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def set_wire(self, state: str) -> None:
        """``up`` or ``down``: nothing comes through, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHosts:
    """``head`` and ``other`` form one Ray cluster; ``env`` is what its processes need."""

    head: Host
    other: Host
    env: dict[str, str]

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:{RAY_PORT}"


@contextmanager
def two_hosts(
    *,
    head_cpus: int,
    other_cpus: int,
    other_sees: Mapping[Path, Path] = NOTHING_ELSE,
    other_offers: str = "{}",
) -> Iterator[RayHosts]:
    """Both hosts, with a Ray of so many logical CPUs in each, inside the block.

    ``other_sees``: directories, and what the other host has there instead; ``other_offers``: its
    custom resources, as Ray wants them.
    """
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="pdh-")))
        env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        head, other = (_host(f"{folder.name}-{i}", f"10.77.0.{i}", undo) for i in (1, 2))
        _join(head, other)
        start = ("-m", "ray.scripts.scripts", "start", "--disable-usage-stats")
        sizes = (f"--object-store-memory={OBJECT_STORE_BYTES}",)
        _run(
            head.command(
                sys.executable,
                *start,
                "--head",
                f"--port={RAY_PORT}",
                "--include-dashboard=false",
                f"--node-ip-address={head.address}",
                f"--num-cpus={head_cpus}",
                f"--temp-dir={folder}",
                *sizes,
            ),
            env,
        )
        hosts = RayHosts(head=head, other=other, env=env)
        _run(
            other.command(
                *_with_mounts(other_sees),
                sys.executable,
                *start,
                f"--address={hosts.ray_address}",
                f"--node-ip-address={other.address}",
                f"--num-cpus={other_cpus}",
                f"--resources={other_offers}",
                *sizes,
            ),
            env,
        )
        yield hosts


def _with_mounts(instead: Mapping[Path, Path]) -> tuple[str, ...]:
    """Before a command: what it sees. `ip netns exec` has made a mount namespace for it."""
    mounts = [f"mount --bind {seen} {path} && " for path, seen in instead.items()]
    return ("sh", "-c", f'{"".join(mounts)}exec "$@"', "sh") if mounts else ()


def _host(namespace: str, address: str, undo: ExitStack) -> Host:
    _ip("netns", "add", namespace)
    undo.callback(_end_host, namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")
    return Host(namespace=namespace, address=address)


def _join(one: Host, two: Host) -> None:
    _ip(
        *("link", "add", INTERFACE, "netns", one.namespace, "type", "veth"),
        *("peer", "name", INTERFACE, "netns", two.namespace),
    )
    for host in (one, two):
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        host.set_wire("up")


def _end_host(namespace: str) -> None:
    """End all processes that live there, then the host."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while (pids := _ip("netns", "pids", namespace).split()) and time.monotonic() < deadline_s:
        subprocess.run(["kill", "-9", *pids], check=False, capture_output=True)
        time.sleep(0.1)
    _ip("netns", "del", namespace)


def _ip(*words: str) -> str:
    assert IP is not None
    return _run([IP, *words], None)


def _run(command: Sequence[str], env: dict[str, str] | None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=RAY_TIMEOUT_S, env=env
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout
