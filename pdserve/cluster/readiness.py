"""Waiting until a router says that it can serve: grpc.health.v1, which follows its readiness."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.core.errors import NoNodeError

# The router is on this host or in this cluster's network: no proxy belongs between.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


async def wait_until_ready(grpc_address: str, timeout_s: float) -> None:
    """Return once the router is ready. Raises NoNodeError where it is not in time."""
    async with grpc.aio.insecure_channel(grpc_address, options=_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            async with asyncio.timeout(timeout_s):
                replies = stub.Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
                async for reply in replies:
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
        except TimeoutError as error:
            raise NoNodeError(f"the router was not ready within {timeout_s:g} s") from error
        except grpc.RpcError as error:
            raise NoNodeError(f"the router at {grpc_address} went away: {error}") from error
    raise NoNodeError(f"the router at {grpc_address} stopped answering")
