"""A router before whole nodes, which is to prove who it is to them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.config import RouterConfig
from pdserve.core.node import NodeAddress
from pdserve.core.security_config import SecurityConfig
from router.server import start_router
from router.service import RouterSpec
from tests.nodes.site import PATIENCE_S
from tests.nodes.specs import MODEL


@asynccontextmanager
async def a_router(
    nodes: tuple[NodeAddress, ...],
    model_dir: Path,
    access: ClusterAccess | None = None,
    *,
    security: SecurityConfig | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    spec = RouterSpec(
        config=RouterConfig(http_port=0, grpc_port=0, local_prefill_below=0),
        served_name="tiny",
        model_dir=model_dir,
        model=MODEL,
        dtype="float32",
        max_model_len=None,
        headroom_tokens=8,
        prefill_configured=True,
        access=access,
        security=security or SecurityConfig(),
        nodes=nodes,
    )
    router = await start_router(spec)
    try:
        url = f"http://{router.http_address}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            yield client
    finally:
        await router.close(0.0)
