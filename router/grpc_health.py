"""grpc.health.v1: one word for all services that there are, asked for or watched.

Whoever watches is told each change as fast as it reads, and holds up nobody else.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """Says NOT_SERVING until it is told otherwise. Of other services it says that it knows none."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = services
        self._is_serving = False
        self._changed = asyncio.Event()

    def set(self, *, serving: bool) -> None:
        """From now on this is the word."""
        self._is_serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "service: there is none of this name")
        return Status(status=self._word(request.service))

    async def List(self, request: object, context: Context) -> None:
        """Newer versions of the protocol have it; the one that we were written for does not."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask for a service by Check")

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            changed, word = self._changed, self._word(request.service)
            if word == told:
                await changed.wait()
            else:
                told = word
                yield Status(status=word)

    def _word(self, service: str) -> int:
        if service not in self._services:
            return Status.SERVICE_UNKNOWN
        return Status.SERVING if self._is_serving else Status.NOT_SERVING
