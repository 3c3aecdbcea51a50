"""From the cluster file, the model and the hardware to what each node is: pure, decided once, at
start.

Owns every default that depends on model or hardware (device, transport, steps in flight, context)
and every check that needs them. Knows no process and no Ray.
"""

import difflib
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.core.config import ClusterConfig, DecodeConfig, PrefillConfig
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.model_spec import ModelSpec
from pdserve.core.node import NodeSpec, Role
from pdserve.engine.attention import ATTENTION_BACKENDS

logger = logging.getLogger(__name__)

DEPTH = {"cpu": 1, "cuda": 2}  # steps in flight
FRONT_CPUS = 1.0  # what a front, and the router, ask Ray for
ROUTER_CPUS = 1.0
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of a Ray cluster."""

    node_id: str  # Ray's
    name: str
    address: str
    resources: tuple[tuple[str, float], ...]  # all that it offers, used or not

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What Ray has to give. None: as many as are asked for (logical CPUs of a private Ray)."""

    num_cpus: float | None
    num_gpus: float
    num_hosts: int = 1
    memory_bytes: int | None = None  # of the one host that there is
    hosts: tuple[Host, ...] = ()  # of a Ray cluster that was joined


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node of the cluster, whichever incarnation of it runs. ``device`` is cpu or cuda."""

    name: str
    role: Role
    device: str
    pool: PrefillConfig | DecodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCluster:
    """The cluster file with nothing left to decide."""

    config: ClusterConfig
    model: ModelSpec
    nodes: tuple[NodePlan, ...]  # prefill-0, …, decode-0, …
    transport: str
    max_model_len: int

    def node_spec(self, plan: NodePlan, incarnation: str, host: str) -> NodeSpec:
        """What the front of this node is told when it starts on ``host``."""
        config = self.config
        return NodeSpec(
            name=plan.name,
            role=plan.role,
            incarnation=incarnation,
            host=host,
            port_range=config.network.port_range,
            model=self.model,
            dtype=config.model.dtype,
            kv_dtype=config.kv_dtype,
            block_size=plan.pool.block_size or config.kv_cache.block_size,
            max_model_len=self.max_model_len,
            pool=plan.pool,
            kv_transfer=config.kv_transfer,
            transport=self.transport,
            depth=DEPTH[plan.device],
            observability=config.observability,
        )


def resolve(config: ClusterConfig, model: ModelSpec, hardware: Hardware) -> ResolvedCluster:
    """Decide what the cluster file leaves open. Raises ConfigError naming the key."""
    nodes = (
        *_nodes(Role.PREFILL, config.prefill),
        *_nodes(Role.DECODE, config.decode),
    )
    for plan in nodes:
        _check_shares(config, plan, model)
        _check_backend(plan)
    _check_fits(nodes, hardware)
    _check_host_resources(config, hardware)
    _check_memory(nodes, hardware)
    _check_reachable(config, hardware)
    _check_local_prefill(config)
    return ResolvedCluster(
        config=config,
        model=model,
        nodes=nodes,
        transport=_transport(config, nodes, hardware),
        max_model_len=_max_model_len(config, model),
    )


def cpus_needed(nodes: Iterable[NodePlan]) -> float:
    """Logical CPUs that all processes of the cluster ask Ray for."""
    needed = ROUTER_CPUS
    for plan in nodes:
        pool = plan.pool
        needed += FRONT_CPUS + pool.resources.num_cpus * pool.tensor_parallel_size
    return needed


def _nodes(role: Role, pool: PrefillConfig | DecodeConfig) -> Iterable[NodePlan]:
    device = _device(role, pool)
    for i in range(pool.replicas):
        yield NodePlan(name=f"{role}-{i}", role=role, device=device, pool=pool)


def _device(role: Role, pool: PrefillConfig | DecodeConfig) -> str:
    num_gpus = pool.resources.num_gpus
    if num_gpus > 1:
        raise ConfigError(
            f"{role}.resources.num_gpus: got {num_gpus:g}, but it counts the GPUs of one rank; "
            f"for more of them raise {role}.tensor_parallel_size"
        )
    if pool.device == "auto":
        return "cuda" if num_gpus else "cpu"
    if pool.device == "cuda" and not num_gpus:
        raise ConfigError(f"{role}.device: cuda needs {role}.resources.num_gpus: 1, got 0")
    if pool.device == "cpu" and num_gpus:
        raise ConfigError(f"{role}.device: cpu, but {role}.resources.num_gpus is {num_gpus:g}")
    return pool.device


def _check_shares(config: ClusterConfig, plan: NodePlan, model: ModelSpec) -> None:
    key, tp_size = f"{plan.role}.tensor_parallel_size", plan.pool.tensor_parallel_size
    for what, count in (
        ("attention heads", model.num_heads),
        ("values of the MLP", model.intermediate_size),
    ):
        if count % tp_size:
            raise ConfigError(f"{key}: {tp_size} ranks cannot share {count} {what} evenly")
    try:
        layout = KvLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            block_size=plan.pool.block_size or config.kv_cache.block_size,
            dtype=config.kv_dtype,
            tp_size=tp_size,
        )
    except ConfigError as error:
        raise ConfigError(f"{plan.role}.{error}") from error
    if plan.device == "cpu" and plan.pool.kv_cache_bytes < layout.block_stride_bytes:
        raise ConfigError(
            f"{plan.role}.kv_cache_bytes: {plan.pool.kv_cache_bytes} hold no block; one takes "
            f"{layout.block_stride_bytes} bytes"
        )


def _check_backend(plan: NodePlan) -> None:
    key, name = f"{plan.role}.attention_backend", plan.pool.attention_backend
    known = ("auto", *sorted(ATTENTION_BACKENDS))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: got {name!r}, allowed are {', '.join(known)}{hint}")


def _check_memory(nodes: tuple[NodePlan, ...], hardware: Hardware) -> None:
    needed = sum(
        plan.pool.kv_cache_bytes * plan.pool.tensor_parallel_size
        for plan in nodes
        if plan.device == "cpu"
    )
    if hardware.memory_bytes is not None and needed > hardware.memory_bytes:
        raise ConfigError(
            "prefill.kv_cache_bytes and decode.kv_cache_bytes: all ranks together ask for "
            f"{needed / GIB:.1f} GiB, but this host or container has "
            f"{hardware.memory_bytes / GIB:.1f} GiB"
        )


def _check_fits(nodes: tuple[NodePlan, ...], hardware: Hardware) -> None:
    num_gpus = sum(p.pool.resources.num_gpus * p.pool.tensor_parallel_size for p in nodes)
    if num_gpus > hardware.num_gpus:
        raise ConfigError(
            f"prefill and decode ask for {num_gpus:g} GPUs (replicas × tensor_parallel_size × "
            f"resources.num_gpus), but there are {hardware.num_gpus:g}"
        )
    num_cpus = cpus_needed(nodes)
    if hardware.num_cpus is not None and num_cpus > hardware.num_cpus:
        raise ConfigError(
            f"nodes and router need {num_cpus:g} CPUs (each rank resources.num_cpus, each front "
            f"{FRONT_CPUS:g}, the router {ROUTER_CPUS:g}), but the Ray cluster has "
            f"{hardware.num_cpus:g}"
        )


def _check_host_resources(config: ClusterConfig, hardware: Hardware) -> None:
    for section, pool in (("prefill", config.prefill), ("decode", config.decode)):
        wanted = pool.host_resource
        if wanted is None or not pool.replicas:
            continue
        if config.ray.address == "local":
            raise ConfigError(
                f"{section}.host_resource: {wanted!r} is to choose hosts of a Ray cluster, but "
                "ray.address is local"
            )
        offered = {name for host in hardware.hosts for name, _ in host.resources}
        if hardware.hosts and wanted not in offered:
            raise ConfigError(
                f"{section}.host_resource: no host of the Ray cluster offers {wanted!r} (as by "
                f"`ray start --resources`); they offer {', '.join(sorted(offered))}"
            )


def _check_reachable(config: ClusterConfig, hardware: Hardware) -> None:
    network = config.network
    if hardware.num_hosts > 1 and network.interface is None and network.host.startswith("127."):
        raise ConfigError(
            f"network.host: {network.host} cannot be reached from the other "
            f"{hardware.num_hosts - 1} hosts of the Ray cluster; set network.interface"
        )


def _check_local_prefill(config: ClusterConfig) -> None:
    asked, step = config.decode.local_prefill_tokens, config.decode.max_num_batched_tokens
    if asked > step:
        logger.warning(
            "decode.local_prefill_tokens: %d is more than a step holds; prompts get at most "
            "decode.max_num_batched_tokens, %d",
            asked,
            step,
        )
    if asked:
        return
    if not config.prefill.replicas:
        raise ConfigError(
            "decode.local_prefill_tokens: 0 leaves nobody to prefill, since prefill.replicas is 0"
        )
    if config.router.local_prefill_below:
        raise ConfigError(
            "router.local_prefill_below: must be 0 where decode.local_prefill_tokens is 0, got "
            f"{config.router.local_prefill_below}"
        )


def _transport(config: ClusterConfig, nodes: tuple[NodePlan, ...], hardware: Hardware) -> str:
    """What carries KV. Any two nodes may meet, so it is one for all of them."""
    all_gpus = {plan.device for plan in nodes} == {"cuda"}
    is_one_host = hardware.num_hosts == 1
    asked = config.kv_transfer.transport
    if asked == "auto":
        best_on_gpus = "cuda_ipc" if is_one_host else "nccl"
        chosen = best_on_gpus if all_gpus else "grpc"
        where = "GPUs" if all_gpus else "not all GPUs"
        num_hosts = hardware.num_hosts
        logger.info("kv_transfer.transport: %s (%s, hosts: %d)", chosen, where, num_hosts)
        return chosen
    if asked in ("nccl", "cuda_ipc") and not all_gpus:
        raise ConfigError(
            f"kv_transfer.transport: {asked} needs GPUs on both sides; use grpc or gloo"
        )
    if asked == "cuda_ipc" and not is_one_host:
        raise ConfigError(
            f"kv_transfer.transport: cuda_ipc works within one host, there are "
            f"{hardware.num_hosts}; use nccl"
        )
    return asked


def _max_model_len(config: ClusterConfig, model: ModelSpec) -> int:
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigError(
            f"model.max_model_len: got {asked}, but the model ends at {model.max_position}"
        )
    return asked or model.max_position
