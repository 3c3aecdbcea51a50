"""Ray for one cluster: a private one that lives and dies with this process, or one to join.

A private Ray listens on the loopback interface alone, has as many logical CPUs as are asked for
(they place processes, they bind no cores) and its own temporary directory. ``set_up_private_ray``
has to run before this module is imported. Call from the main thread: Ray's processes end with the
thread that started them.
"""

import ctypes
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from pdserve.cluster.ray_head import WATCHED, JoinedHead, PrivateHead, RayHead
from pdserve.cluster.resolve import Hardware, Host
from pdserve.cluster.signal_watch import SignalWatch
from pdserve.cluster.signals import heeded
from pdserve.core.errors import ConfigError

NAMESPACE = "pdserve"
OBJECT_STORE_BYTES = 80 << 20  # about Ray's least: nothing of ours goes there
CONNECT_TIMEOUT_S = 5.0
ADOPT_ORPHANS = 36  # prctl's PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySession:
    """A Ray that is up."""

    hardware: Hardware
    head: RayHead


@contextmanager
def private_ray(
    num_cpus: float, temp_dir: Path, kept_logs: Path, watch: SignalWatch
) -> Iterator[RaySession]:
    """A Ray of our own inside the block. ``kept_logs``: where its log goes should it die."""
    _adopt_orphans()
    with _children_in_groups_of_their_own():
        _init(
            watch,
            address="local",
            num_cpus=math.ceil(num_cpus),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temp_dir),
        )
    try:
        # CPUs: as many as were asked for
        hardware = replace(_hardware(), num_cpus=None, hosts=())
        yield RaySession(hardware=hardware, head=_private_head(kept_logs, watch))
    finally:
        ray.shutdown()


@contextmanager
def joined_ray(address: str, watch: SignalWatch) -> Iterator[RaySession]:
    """A connection to a running Ray cluster inside the block. Raises ConfigError."""
    _check_reachable(address)
    try:
        _init(watch, address=address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray.address: cannot join {address!r}: {error}") from error
    try:
        yield RaySession(hardware=_hardware(), head=_joined_head(address))
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # auto, or whatever else Ray makes of it
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray.address: no Ray listens at {address!r}: {error}") from error


def _private_head(kept_logs: Path, watch: SignalWatch) -> PrivateHead:
    node = _node()
    processes = {name: node.all_processes[name][0].process.pid for name in WATCHED}
    ray_logs = Path(node.get_logs_dir_path())
    return PrivateHead(processes=processes, ray_logs=ray_logs, kept_logs=kept_logs, watch=watch)


def _joined_head(address: str) -> JoinedHead:
    if address.startswith("ray://"):
        log = "/tmp/ray/session_latest/logs/ray_client_server.err"
        return JoinedHead(address=address.removeprefix("ray://"), log=log)
    log = f"{_node().get_logs_dir_path()}/gcs_server.out"
    return JoinedHead(address=ray.get_runtime_context().gcs_address, log=log)


def _node() -> Any:  # noqa: ANN401  (Ray's own)
    """What Ray knows of this host. Not where Ray is joined through its client."""
    return ray._private.worker._global_node


def _adopt_orphans() -> None:
    """What Ray has started stays below this process when Ray dies, so that it can be ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl: this process can not adopt orphans")


@contextmanager
def _children_in_groups_of_their_own() -> Iterator[None]:
    """A signal to our process group (Ctrl-C, `timeout`) is for us alone: we end Ray in order.

    Processes started inside the block get a group of their own; they still die with us.
    """
    inside = True

    def leave_group() -> None:
        if inside:
            os.setpgid(0, 0)

    os.register_at_fork(after_in_child=leave_group)
    try:
        yield
    finally:
        inside = False


def _init(watch: SignalWatch, **options: Any) -> None:  # noqa: ANN401  (Ray's own)
    """Connect quietly, without Ray's hand on the signals of this process.

    A first signal is acted on only when Ray is up: half started, it could not be ended in order. A
    second one ends everything by force.
    """
    came: list[int] = []

    def remember(number: int, frame: object) -> None:
        came.append(number)

    handlers = {number: signal.signal(number, remember) for number in heeded()}
    try:
        with watch.by_force():
            ray.init(
                log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE, **options
            )
    except SystemExit:  # of the handler that Ray puts in at its end
        came.append(signal.SIGTERM)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        ray.shutdown()
        raise KeyboardInterrupt


def _hardware() -> Hardware:
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return Hardware(
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        num_hosts=len(alive),
        hosts=tuple(map(_host, alive)),
    )


def _host(node: dict[str, Any]) -> Host:
    return Host(
        node_id=node["NodeID"],
        name=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        resources=tuple(sorted(node["Resources"].items())),
    )
