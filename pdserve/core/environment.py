"""The one file that reads the process environment. Everything else takes paths and values as
arguments.
"""

import fcntl
import os
import secrets
from pathlib import Path

RAY_TOKEN_BYTES = 32


def cache_dir() -> Path:
    """Where pdserve keeps what it can make again: models, kernels, run files.

    ``$PDSERVE_CACHE``, else ``$XDG_CACHE_HOME/pdserve``, else ``~/.cache/pdserve``. A variable that
    is set to nothing counts as unset.
    """
    if own := os.environ.get("PDSERVE_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "pdserve"
    return Path.home() / ".cache" / "pdserve"


def otlp_protocol() -> str:
    """How traces are sent, by OpenTelemetry's own variables: ``http/protobuf`` or ``grpc``."""
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general or "http/protobuf"


def api_key() -> str | None:
    """``$PDSERVE_API_KEY``: what clients of ours call with where nothing else is said."""
    return os.environ.get("PDSERVE_API_KEY") or None


def take_secret(name: str) -> str | None:
    """The value of a variable, which is gone from the environment then: children do not get it."""
    return os.environ.pop(name, None) or None


def set_up_private_ray() -> None:
    """What a private Ray and its processes read from the environment, set before ray is imported.

    They inherit it: no usage statistics, everything on the loopback interface (Ray calls that "no
    cluster"), no killing of processes by free memory, no prestarted workers, no metrics; GPUs stay
    visible to all ranks, which take their device by index. A token of its own: others on this host
    reach its ports, and whoever may speak to Ray may run code. What the user has set stays.
    """
    for name, value in _PRIVATE_RAY.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(RAY_TOKEN_BYTES)


def set_up_gpu_rank() -> None:
    """What CUDA, NCCL and flash-attn read from the environment, set before a process first uses its
    GPU.

    torch's watchdog must not end the process when a peer is gone, or when it looks at an event of a
    group that is let go of: our own deadlines do what there is to do. Kernels are loaded at start:
    loading one while a transfer's kernel waits for its peer would wait with it. Ranks of a group
    may each see one GPU only, then all by the same number. NVLink multicast is not used. flash-attn
    keeps the kernels that it compiles, which takes it most of a rank's start, where there is a
    place for them. What the user has set stays.
    """
    kernels = cache_dir() / "flash_attn"
    kept = _kept_kernels(kernels) if _can_lock_files(kernels) else {}
    for name, value in (_GPU_RANK | kept).items():
        os.environ.setdefault(name, value)


def _can_lock_files(directory: Path) -> bool:
    """Where a file system has no locks, flash-attn waits 15 s for one and fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _kept_kernels(directory: Path) -> dict[str, str]:
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(directory),
    }


def set_up_front() -> None:
    """What gRPC reads from the environment, set before a front or the router first uses it.

    Its event engine hands each message to one more thread: a message and its answer between two
    processes took 0.56 ms with it, 0.34 ms without (measured on the host of two H200s). A version
    of gRPC that does not know these words says so and goes on. What the user has set stays.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


_GPU_RANK = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "CUDA_MODULE_LOADING": "EAGER",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

_PRIVATE_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a call after its end must not start another
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning at every start
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
