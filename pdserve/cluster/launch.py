"""Brings a cluster up and takes it down: name, model, Ray, nodes, router, run file.

    opened_site    all that comes before the first process of ours; undone in reverse order
    start_cluster  nodes side by side, then the router

Owns the order. Who runs is the supervisor's business, how it runs the launcher's.
"""

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.cluster.addresses import callable_address, host_address, settled_ports
from pdserve.cluster.backoff import Backoff
from pdserve.cluster.front import RouterAddress
from pdserve.cluster.host_check import RayLookout, Wanted, check_hosts, hosts_for
from pdserve.cluster.host_memory import host_memory_bytes
from pdserve.cluster.incarnation import shared_dir
from pdserve.cluster.open_files import allow_open_files, too_few_for
from pdserve.cluster.process_log import log_dir, prints_to_file, set_aside
from pdserve.cluster.protection import find_protection, gaps, settled
from pdserve.cluster.ray_head import RayHead
from pdserve.cluster.ray_launcher import RayLauncher
from pdserve.cluster.ray_session import RaySession, joined_ray, private_ray
from pdserve.cluster.readiness import wait_until_ready
from pdserve.cluster.resolve import Hardware, ResolvedCluster, cpus_needed, resolve
from pdserve.cluster.run_file import Claim, RunRecord, claim, run_folder
from pdserve.cluster.signal_watch import SignalWatch
from pdserve.cluster.site import Site
from pdserve.cluster.supervisor import Supervisor
from pdserve.cluster.version import version
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import ClusterConfig
from pdserve.core.model_identity import ModelIdentity, check_weights_are_there, identity_of
from pdserve.core.model_spec import read_model_spec
from pdserve.core.node import NodeStanding
from pdserve.models.fetch import locate

logger = logging.getLogger(__name__)

Say = Callable[[str, str], None]  # a stage, and what there is to say about it

ROOM_TO_GROW = 256.0  # logical CPUs of a private Ray, for nodes that are added later

READY_TIMEOUT_S = 120.0  # for the nodes to connect to each other


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSite:
    """Where a cluster can be started."""

    site: Site
    claim: Claim
    record: RunRecord
    head: RayHead

    @property
    def has_keys(self) -> bool:
        """Whether callers need an API key."""
        security = self.site.cluster.config.security
        return self.site.protection.api_keys is not None or security.api_keys_file is not None


@contextmanager
def opened_site(
    config: ClusterConfig, name: str | None, say: Say, watch: SignalWatch
) -> Iterator[OpenedSite]:
    """Check everything, claim the name and bring up Ray, inside the block. Main thread only.

    Raises ConfigError or ModelFilesError.
    """
    num_files = allow_open_files()
    with ExitStack() as undo:
        router = undo.enter_context(settled_ports(config.router))
        config = replace(config, router=router, security=settled(config.security))
        protection = find_protection(config.security)
        model_dir = locate(config.model.source, config.model.revision, key="model.source")
        identity = _identity(config, model_dir)
        planned = resolve(config, read_model_spec(model_dir), _known_hardware(config))
        say("model", _describe_model(planned, model_dir))
        for gap in gaps(config, protection, planned.transport):
            say("warning", gap)
        if (problem := too_few_for(router.limits.max_connections, num_files)) is not None:
            say("warning", problem)
        held = claim(run_folder(), name)
        undo.callback(held.release)
        record = _first_record(held.name)
        for leftover in record.leftovers:
            undo.callback(shutil.rmtree, leftover, ignore_errors=True)
        held.publish(record)
        set_aside(Path(record.log_dir))
        say("logs", record.log_dir)
        undo.enter_context(prints_to_file(held.name, "command"))
        began_s = time.monotonic()
        session = undo.enter_context(_ray(planned, record, watch))
        hardware = session.hardware
        say("ray", f"{_describe_ray(config, hardware)} ({time.monotonic() - began_s:.1f} s)")
        cluster = resolve(config, planned.model, hardware)
        _check_hosts(cluster, hardware, model_dir, identity)
        site = Site(
            cluster=cluster,
            model_dir=model_dir,
            model_identity=identity,
            run_token=record.run_token,
            log_folder=held.name,
            admin_token=record.admin_token,
            protection=protection,
        )
        yield OpenedSite(site=site, claim=held, record=record, head=session.head)


class Cluster:
    """A cluster that serves. Ended by ``close`` or ``kill``."""

    def __init__(self, supervisor: Supervisor, router: RouterAddress) -> None:
        self._supervisor = supervisor
        self.router = router

    async def close(self, grace_s: float) -> None:
        """Let requests finish for ``grace_s`` seconds, then end everything."""
        await self._supervisor.close(grace_s)

    async def kill(self) -> None:
        """End everything at once."""
        await self._supervisor.kill()


async def start_cluster(opened: OpenedSite, say: Say) -> Cluster:
    """Start everything and publish where it is. A start that fails leaves nothing running.

    Raises the PdserveError of what could not start.
    """
    site = opened.site
    config = site.cluster.config.router
    router = RouterAddress(
        http=callable_address(config.host, config.http_port),
        grpc=callable_address(config.host, config.grpc_port),
    )
    is_ready = asyncio.Event()

    def on_event(event: str) -> None:
        say("cluster", event)
        if is_ready.is_set():
            _publish(opened, router, supervisor.standings)

    supervisor = Supervisor(
        RayLauncher(site, opened.head, say),
        site.cluster.nodes,
        clock=MonotonicClock(),
        backoff=Backoff(),
        on_event=on_event,
        max_n=config.limits.max_n,
    )
    await supervisor.start()
    try:
        certificate = site.cluster.config.security.tls_certificate
        await wait_until_ready(router.grpc, READY_TIMEOUT_S, certificate)
    except BaseException:
        await supervisor.kill()
        raise
    supervisor.note_ready()
    is_ready.set()
    _publish(opened, router, supervisor.standings)
    return Cluster(supervisor, router)


def _publish(
    opened: OpenedSite, router: RouterAddress, standings: tuple[NodeStanding, ...]
) -> None:
    """Tell commands where the cluster is and, as it changes, of which nodes in which roles."""
    security = opened.site.cluster.config.security
    record = replace(
        opened.record,
        http_url=f"{security.scheme}://{router.http}",
        certificate=security.tls_certificate,
        grpc_address=router.grpc,
        nodes={node.name: node.role.value for node in standings},
    )
    try:
        opened.claim.publish(record)
    except OSError as error:  # it serves on all the same
        logger.warning("the run file cannot be written: %s", error)


def _identity(config: ClusterConfig, model_dir: Path) -> ModelIdentity:
    """What all ranks have to find. Where weights are random, files of them do not matter."""
    identity = identity_of(model_dir)
    if config.model.load_format == "dummy":
        return replace(identity, weights=())
    check_weights_are_there(model_dir)
    return identity


def _check_hosts(
    cluster: ResolvedCluster, hardware: Hardware, model_dir: Path, identity: ModelIdentity
) -> None:
    hosts = hosts_for(cluster.nodes, hardware.hosts)
    wanted = Wanted(model_dir=model_dir, identity=identity, version=version())
    check_hosts(hosts, wanted, RayLookout(), cluster.config.model.source)


def _known_hardware(config: ClusterConfig) -> Hardware:
    """What is known before Ray runs: only a private Ray is sure to be on this host.

    Raises ConfigError where a private Ray's nodes could not bind their address.
    """
    memory_bytes = None
    if config.ray.address == "local":
        host_address(config.network)
        memory_bytes = host_memory_bytes()
    return Hardware(num_cpus=None, num_gpus=float("inf"), memory_bytes=memory_bytes)


def _first_record(name: str) -> RunRecord:
    run_token = secrets.token_hex(4)
    ray_dir = tempfile.mkdtemp(prefix="pdserve-")  # short: Ray's sockets have 107 characters
    return RunRecord(
        name=name,
        pid=os.getpid(),
        run_token=run_token,
        admin_token=secrets.token_hex(16),
        log_dir=str(log_dir(name)),
        leftovers=(ray_dir, str(shared_dir(run_token))),
    )


def _ray(
    planned: ResolvedCluster, record: RunRecord, watch: SignalWatch
) -> AbstractContextManager[RaySession]:
    address = planned.config.ray.address
    if address == "local":
        num_cpus = cpus_needed(planned.nodes) + ROOM_TO_GROW
        return private_ray(num_cpus, Path(record.leftovers[0]), Path(record.log_dir), watch)
    return joined_ray(address, watch)


def _describe_model(planned: ResolvedCluster, model_dir: Path) -> str:
    model, config = planned.model, planned.config.model
    return (
        f"{config.name}: {model.architecture}, {model.num_layers} layers, {config.dtype}, "
        f"context {planned.max_model_len}, from {model_dir}"
    )


def _describe_ray(config: ClusterConfig, hardware: Hardware) -> str:
    if config.ray.address == "local":
        return "private"
    hosts = "1 host" if hardware.num_hosts == 1 else f"{hardware.num_hosts} hosts"
    return f"{config.ray.address}: {hosts}, {hardware.num_cpus:g} CPUs, {hardware.num_gpus:g} GPUs"
