"""The cluster file as frozen dataclasses: one class per section, one field per key, all defaults
here.

Nothing writes to a config later. A value out of range raises ConfigError naming the key, what was
got and what is allowed. Reading the file is ``config_file.py``; checks that need the model or the
hardware are made where those are known.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pdserve.core.config_checks import a_time as _a_time
from pdserve.core.config_checks import above as _above
from pdserve.core.config_checks import at_least as _at_least
from pdserve.core.config_checks import at_most as _at_most
from pdserve.core.config_checks import one_of as _one_of
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import DTYPE_BYTES
from pdserve.core.observability_config import ObservabilityConfig
from pdserve.core.routing_config import (
    POLICY_NAMES,
    ConditionalConfig,
    PrefixConfig,
    SloConfig,
)
from pdserve.core.security_config import SecurityConfig

FIRST_USER_PORT, LAST_PORT = 1024, 65535
LEAST_SILENCE_S = 2.0
TOOL_CALL_FORMATS = ("auto", "hermes", "llama3_json", "mistral")
LEAST_HEADER_BYTES = 4096  # what ordinary clients send, and a key
LEAST_HEADERS = 16
MAX_NODES = 1024  # of a role: more is a slip of the finger
MAX_THREADS = 1024
MAX_SEQS = 65536  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served."""

    source: str = "smollm2-135m-instruct"  # a name of `pdserve models`, a directory, or a hub id
    revision: str | None = None  # of a hub's model: branch, tag or commit; default: main
    served_name: str | None = None  # what clients call it; default: the source's last path part
    dtype: str = "float32"
    max_model_len: int | None = None  # prompt + output tokens; default: what model and caches allow
    load_format: str = "auto"  # auto: safetensors; dummy: random weights of the given config.json

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, tuple(DTYPE_BYTES))
        _one_of("model.load_format", self.load_format, ("auto", "dummy"))
        if self.max_model_len is not None:
            _at_least("model.max_model_len", self.max_model_len, 2)
        if not self.name:
            raise ConfigError("model.served_name: got '', clients need a name to ask for")

    @property
    def name(self) -> str:
        """What clients call the model."""
        return Path(self.source).name if self.served_name is None else self.served_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Where Ray comes from."""

    address: str = "local"  # local: a private Ray; auto or ray://host:port: an existing cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Where nodes listen for each other."""

    host: str = "127.0.0.1"  # address nodes bind and announce; on several hosts an interface's
    interface: str | None = None  # name of a network interface; its address replaces `host`
    port_range: tuple[int, int] | None = None  # inclusive; default: the system picks
    silence_s: float = 5.0  # who says nothing for so long is dead: requests go on elsewhere

    def __post_init__(self) -> None:
        if self.silence_s < LEAST_SILENCE_S:
            raise ConfigError(
                f"network.silence_s: got {self.silence_s:g}, allowed are {LEAST_SILENCE_S:g} and "
                "more: each process says something every second"
            )
        _a_time("network.silence_s", self.silence_s)
        if self.port_range is not None:
            low, high = self.port_range
            if not FIRST_USER_PORT <= low <= high <= LAST_PORT:
                raise ConfigError(
                    f"network.port_range: [{low}, {high}] is not an ascending pair in 1024..65535"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesConfig:
    """What each rank asks Ray for."""

    num_cpus: float = 1.0  # logical CPUs
    num_gpus: float = 0.0  # on GPUs: 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The prefill pool."""

    replicas: int = 1  # nodes; 0: decode nodes prefill locally
    tensor_parallel_size: int = 1
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    host_resource: str | None = None  # a Ray resource that a node's host has to offer
    device: str = "auto"  # auto: cuda where ranks have GPUs, else cpu
    num_threads: int = 1  # compute threads of each rank on a CPU
    max_num_batched_tokens: int = 256  # prompt tokens of one step; nothing of it is freed sooner
    max_num_seqs: int = 64  # prompts in work at once
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int = 1 << 30  # per rank on a CPU; on a GPU the memory left decides
    block_size: int | None = None  # default: kv_cache.block_size
    attention_backend: str = "auto"
    overtake_s: float = 2.0  # how long a prompt of the next shorter lane may overtake
    enable_prefix_caching: bool = True  # KV of prompts stays, for others that begin alike
    remeasure_idle_s: float | None = 30.0  # idle for so long, it measures its costs again

    def __post_init__(self) -> None:
        _check_pool("prefill", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The decode pool."""

    replicas: int = 1
    tensor_parallel_size: int = 1
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    host_resource: str | None = None
    device: str = "auto"
    num_threads: int = 1
    max_num_batched_tokens: int = (
        512  # tokens of one step: decodes and local prefill chunks together
    )
    max_num_seqs: int = 256  # sequences decoding at once
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int = 1 << 30
    block_size: int | None = None
    attention_backend: str = "auto"
    local_prefill_tokens: int = 256  # prompt tokens a step spends on requests routed here; 0: none
    fallback_chunk: int = 128  # prompt tokens a step spends on fallbacks and recomputes
    headroom_tokens: int = 64  # output tokens a request reserves blocks for before its prefill
    overtake_s: float = 2.0  # how long others may pass a request that waits for many blocks
    enable_prefix_caching: bool = True  # KV of prompts and answers stays, likewise
    remeasure_idle_s: float | None = 30.0

    def __post_init__(self) -> None:
        _check_pool("decode", self)
        if self.replicas < 1:
            raise ConfigError(f"decode.replicas: got {self.replicas}, allowed are 1 and more")
        _at_least("decode.local_prefill_tokens", self.local_prefill_tokens, 0)
        _at_least("decode.fallback_chunk", self.fallback_chunk, 1)
        _at_least("decode.headroom_tokens", self.headroom_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """How KV is kept."""

    block_size: int = 16  # token positions of a block
    dtype: str = "auto"  # auto: the model's

    def __post_init__(self) -> None:
        _one_of("kv_cache.dtype", self.dtype, ("auto", *DTYPE_BYTES))
        _at_least("kv_cache.block_size", self.block_size, 1)


MIN_FRAME_BYTES, MAX_FRAME_BYTES = 1 << 16, 256 << 20
MAX_NCCL_CHANNELS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """How KV moves between nodes."""

    transport: str = "auto"  # auto, grpc, gloo, nccl, cuda_ipc
    frame_bytes: int | None = None  # payload of one message; default: 2 MiB, over nccl 256 MiB
    staging_bytes: int | None = None  # on their way at once on a link; default: 4 frames, nccl 2
    nccl_channels: int | None = None  # thread blocks that move a pair's bytes; default: NCCL's
    timeout_s: float = 30.0  # for one operation; then the pair is closed and remade

    def __post_init__(self) -> None:
        known = "auto", "grpc", "gloo", "nccl", "cuda_ipc"
        _one_of("kv_transfer.transport", self.transport, known)
        frame_bytes = MIN_FRAME_BYTES if self.frame_bytes is None else self.frame_bytes
        if not MIN_FRAME_BYTES <= frame_bytes <= MAX_FRAME_BYTES:
            raise ConfigError(
                f"kv_transfer.frame_bytes: got {frame_bytes}, "
                f"allowed are {MIN_FRAME_BYTES} to {MAX_FRAME_BYTES}"
            )
        if self.staging_bytes is not None:
            _at_least("kv_transfer.staging_bytes", self.staging_bytes, frame_bytes)
        if self.nccl_channels is not None and not 1 <= self.nccl_channels <= MAX_NCCL_CHANNELS:
            raise ConfigError(
                f"kv_transfer.nccl_channels: got {self.nccl_channels}, "
                f"allowed are 1 to {MAX_NCCL_CHANNELS}"
            )
        _above("kv_transfer.timeout_s", self.timeout_s, 0)
        _a_time("kv_transfer.timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptClass:
    """Prompts shorter than ``below`` tokens that no earlier class took."""

    name: str  # as metrics, statuses and logs call it
    below: int | None = None  # None: no bound (the last class)
    prefill_nodes: tuple[str, ...] = ()  # names such as prefill-0; none: all
    max_queued: int | None = None  # of this class may wait at the router; None: no bound of its own
    queue_timeout_s: float | None = None  # default: router.limits.queue_timeout_s

    def __post_init__(self) -> None:
        if self.max_queued is not None:
            _at_least(f"router.classes.{self.name}.max_queued", self.max_queued, 1)
        if self.queue_timeout_s is not None:
            _above(f"router.classes.{self.name}.queue_timeout_s", self.queue_timeout_s, 0)
            _a_time(f"router.classes.{self.name}.queue_timeout_s", self.queue_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What the router lets in."""

    max_queued_requests: int = 1024  # accepted and not yet finished
    max_body_bytes: int = 16 << 20  # of one HTTP request
    max_n: int = 16  # choices of one request
    max_prompts: int = 256  # prompts of one batch
    client_stall_s: float = 60.0  # a client that reads nothing for so long is dropped
    request_timeout_s: float = 600.0  # from arrival to last token
    queue_timeout_s: float = 300.0  # a request that no node had room for is dropped then
    priority_step_s: float = 5.0  # what one step of `priority` is worth in arriving earlier
    max_sent_ahead: int = 4  # requests that wait on a node for blocks, so that it never idles
    kv_watermark: float = 0.95  # share of a node's KV blocks that new requests may fill
    max_prefill_wait_s: float | None = None  # prompts ahead on a node; more wait at the router
    max_header_bytes: int = 32 << 10  # of one call's head
    max_headers: int = 100
    max_connections: int = 4096  # open HTTP connections, idle ones too
    max_grpc_calls: int = 4096  # open gRPC calls
    header_timeout_s: float = 10.0  # a head that is not there by then ends its connection
    body_timeout_s: float = 60.0  # likewise a body, or a gRPC message
    keep_alive_s: float = 75.0  # an HTTP connection lives so long between two requests
    max_grammar_bytes: int = 64 << 10  # of a JSON schema, regular expression or grammar
    grammar_timeout_s: float = 2.0  # processor time that compiling one may take

    def __post_init__(self) -> None:
        for key in (
            "max_queued_requests",
            "max_body_bytes",
            "max_n",
            "max_prompts",
            "max_grammar_bytes",
        ):
            _at_least(f"router.limits.{key}", getattr(self, key), 1)
        _at_least("router.limits.max_header_bytes", self.max_header_bytes, LEAST_HEADER_BYTES)
        for key in ("max_headers", "max_connections", "max_grpc_calls"):
            _at_least(f"router.limits.{key}", getattr(self, key), LEAST_HEADERS)
        for key in (
            "client_stall_s",
            "request_timeout_s",
            "queue_timeout_s",
            "header_timeout_s",
            "body_timeout_s",
            "keep_alive_s",
            "grammar_timeout_s",
        ):
            _above(f"router.limits.{key}", getattr(self, key), 0)
            _a_time(f"router.limits.{key}", getattr(self, key))
        for key in ("priority_step_s", "max_sent_ahead"):
            _at_least(f"router.limits.{key}", getattr(self, key), 0)
        _a_time("router.limits.priority_step_s", self.priority_step_s)
        if self.max_prefill_wait_s is not None:
            _at_least("router.limits.max_prefill_wait_s", self.max_prefill_wait_s, 0)
            _a_time("router.limits.max_prefill_wait_s", self.max_prefill_wait_s)
        if not 0 < self.kv_watermark <= 1:
            raise ConfigError(
                f"router.limits.kv_watermark: got {self.kv_watermark}, allowed are numbers above "
                "0, at most 1"
            )


_DEFAULT_CLASSES = (
    PromptClass(name="short", below=128),
    PromptClass(name="medium", below=2048),
    PromptClass(name="long"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The front door."""

    host: str = "127.0.0.1"
    http_port: int = 8000  # 0: the system picks
    grpc_port: int = 8001
    policy: str = "length"  # one of routing_config.POLICY_NAMES
    classes: tuple[PromptClass, ...] = _DEFAULT_CLASSES
    rebalance_classes: bool = False  # policy `length`: borders move toward equal work per class
    local_prefill_below: int = 128  # shorter prompts are prefilled on the decode node; 0: none are
    slo: SloConfig = field(default_factory=SloConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    conditional: ConditionalConfig = field(default_factory=ConditionalConfig)
    tool_call_format: str = "auto"  # how the model writes tool calls; auto: as its template says
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        for key in ("http_port", "grpc_port"):
            if not 0 <= getattr(self, key) <= LAST_PORT:
                raise ConfigError(f"router.{key}: got {getattr(self, key)}, allowed are 0 to 65535")
        if self.http_port == self.grpc_port != 0:
            raise ConfigError(f"router.grpc_port: {self.grpc_port} is router.http_port already")
        _at_least("router.local_prefill_below", self.local_prefill_below, 0)
        _one_of("router.policy", self.policy, POLICY_NAMES)
        _one_of("router.tool_call_format", self.tool_call_format, TOOL_CALL_FORMATS)
        _check_classes(self.classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The whole cluster file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    kv_transfer: KvTransferConfig = field(default_factory=KvTransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        _check_class_nodes(self.router.classes, self.prefill.replicas)

    @property
    def kv_dtype(self) -> str:
        return self.model.dtype if self.kv_cache.dtype == "auto" else self.kv_cache.dtype


def _check_pool(section: str, pool: PrefillConfig | DecodeConfig) -> None:
    _at_least(f"{section}.replicas", pool.replicas, 0)
    _at_most(f"{section}.replicas", pool.replicas, MAX_NODES)
    _at_least(f"{section}.tensor_parallel_size", pool.tensor_parallel_size, 1)
    _at_least(f"{section}.num_threads", pool.num_threads, 1)
    _at_most(f"{section}.num_threads", pool.num_threads, MAX_THREADS)
    _at_least(f"{section}.max_num_batched_tokens", pool.max_num_batched_tokens, 1)
    _at_least(f"{section}.max_num_seqs", pool.max_num_seqs, 1)
    _at_most(f"{section}.max_num_seqs", pool.max_num_seqs, MAX_SEQS)
    _at_least(f"{section}.overtake_s", pool.overtake_s, 0)
    _a_time(f"{section}.overtake_s", pool.overtake_s)
    if pool.remeasure_idle_s is not None:
        _above(f"{section}.remeasure_idle_s", pool.remeasure_idle_s, 0)
        _a_time(f"{section}.remeasure_idle_s", pool.remeasure_idle_s)
    _at_least(f"{section}.resources.num_cpus", pool.resources.num_cpus, 0)
    _at_least(f"{section}.resources.num_gpus", pool.resources.num_gpus, 0)
    _at_least(f"{section}.kv_cache_bytes", pool.kv_cache_bytes, 1)
    if pool.block_size is not None:
        _at_least(f"{section}.block_size", pool.block_size, 1)
    _one_of(f"{section}.device", pool.device, ("auto", "cpu", "cuda"))
    if not 0 < pool.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"{section}.gpu_memory_utilization: got {pool.gpu_memory_utilization}, "
            "allowed are numbers above 0, at most 1"
        )


def _check_classes(classes: tuple[PromptClass, ...]) -> None:
    if not classes or classes[-1].below is not None:
        raise ConfigError(
            "router.classes: the last class must have no `below`, so that every prompt fits one"
        )
    bounds = [c.below for c in classes[:-1]]
    given = [bound for bound in bounds if bound is not None]
    if given != bounds or sorted({0, *given}) != [0, *given]:
        raise ConfigError(
            f"router.classes: `below` must be given, above 0 and ascend, got {bounds}"
        )
    names = [c.name for c in classes]
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise ConfigError(f"router.classes: every class needs a name of its own, got {names}")


def _check_class_nodes(classes: tuple[PromptClass, ...], num_prefill: int) -> None:
    known = [f"prefill-{i}" for i in range(num_prefill)]
    for i, prompt_class in enumerate(classes):
        for name in prompt_class.prefill_nodes:
            if name not in known:
                raise ConfigError(
                    f"router.classes[{i}].prefill_nodes: no prefill node is called {name!r}; "
                    f"there are {', '.join(known) or 'none'}"
                )
