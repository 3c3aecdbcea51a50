"""The router in its process."""

import asyncio

from pdserve.cluster.front import RouterAddress
from pdserve.cluster.open_files import allow_open_files
from pdserve.cluster.site import RouterStart
from pdserve.core.errors import PdserveError
from pdserve.core.node import NodeStanding, Role
from pdserve.core.orders import OrderAnswer, PlacedOrder
from pdserve.telemetry.traces import Tracer, close_tracer, tracer_for
from router.server import Router, start_router
from router.service import RouterSpec


class RouterFront:
    """A ``RouterSide``. A router never gives up by itself: it lives as long as its process."""

    def __init__(self, router: Router, tracer: Tracer | None) -> None:
        self._router = router
        self._tracer = tracer
        self.failed: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()

    @property
    def facts(self) -> RouterAddress:
        return RouterAddress(http=self._router.http_address, grpc=self._router.grpc_address)

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        self._router.set_standings(nodes)

    async def next_order(self) -> PlacedOrder:
        return await self._router.orders.next()

    async def answer(self, answer: OrderAnswer) -> None:
        self._router.orders.answer(answer)

    async def close(self, grace_s: float) -> None:
        await self._router.close(grace_s)
        if self._tracer is not None:
            await close_tracer(self._tracer)


async def start_front(start: RouterStart) -> RouterFront:
    """Listen; the nodes come by ``set_nodes``. Raises ConfigError or ModelFilesError."""
    allow_open_files()  # where Ray was joined its own limit would hold
    site = start.site
    cluster = site.cluster
    config = cluster.config
    spec = RouterSpec(
        config=config.router,
        served_name=config.model.name,
        model_dir=site.model_dir,
        model=cluster.model,
        dtype=config.model.dtype,
        max_model_len=cluster.max_model_len,
        headroom_tokens=config.decode.headroom_tokens,
        prefill_configured=bool(config.prefill.replicas),
        was_ready=start.was_ready,
        admin_token=site.admin_token,
        security=config.security,
        api_keys=site.protection.api_keys,
        access=site.access,
        caching=frozenset(
            role
            for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode))
            if pool.enable_prefix_caching
        ),
    )
    tracer = tracer_for(config.observability, "router")
    silence_s = config.network.silence_s
    return RouterFront(await start_router(spec, silence_s=silence_s, tracer=tracer), tracer)
