"""One rank of an incarnation in its process. Imports the engine, and with it torch."""

import socket

from pdserve.cluster.addresses import host_address
from pdserve.cluster.incarnation import Incarnation
from pdserve.cluster.site import Site
from pdserve.core.errors import ModelFilesError
from pdserve.core.model_identity import check_identity
from pdserve.engine.engine_config import EngineConfig
from pdserve.rank.process import run_rank
from pdserve.rank.spec import RankSpec


def run_incarnation(incarnation: Incarnation, rank: int, device_index: int | None) -> None:
    """Be rank ``rank`` until the front stops it or is gone. ``device_index``: the GPU Ray gave."""
    check_model(incarnation.site)
    run_rank(rank_spec(incarnation, rank, device_index))


def check_model(site: Site) -> None:
    """This host may have come after the others were looked at. Raises ModelFilesError."""
    try:
        check_identity(site.model_dir, site.model_identity)
    except ModelFilesError as error:
        raise ModelFilesError(f"host {socket.gethostname()}: {error}") from error


def rank_spec(incarnation: Incarnation, rank: int, device_index: int | None) -> RankSpec:
    """What this rank is told."""
    site, plan = incarnation.site, incarnation.plan
    cluster = site.cluster
    config, pool = cluster.config, plan.pool
    engine = EngineConfig(
        model_dir=site.model_dir,
        spec=cluster.model,
        load_format=config.model.load_format,
        device=plan.device if device_index is None else f"{plan.device}:{device_index}",
        dtype=config.model.dtype,
        tp_size=pool.tensor_parallel_size,
        tp_rank=rank,
        block_size=pool.block_size or config.kv_cache.block_size,
        kv_dtype=config.kv_dtype,
        kv_cache_bytes=pool.kv_cache_bytes,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=cluster.max_model_len,
        num_threads=pool.num_threads,
        attention_backend=pool.attention_backend,
        gpu_memory_utilization=pool.gpu_memory_utilization if plan.device == "cuda" else None,
    )
    return RankSpec(
        node=plan.name,
        peer_id=incarnation.id,
        run_dir=incarnation.make_run_dir(),
        engine=engine,
        kv_transfer=config.kv_transfer,
        host=host_address(config.network),
        port_range=config.network.port_range,
        access=site.access,
        start_timeout_s=incarnation.start_timeout_s,
    )
