"""The gate before a node's gRPC services: calls without a proof end before anything is read."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from threading import Lock
from typing import Any, TypeAlias

import grpc

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.errors import UnauthenticatedError
from pdserve.core.refusals import Refusals
from pdserve.rpc.gate import METADATA_KEY, Gate
from pdserve.rpc.v1 import gate_pb2, gate_pb2_grpc

SERVICE = gate_pb2.DESCRIPTOR.services_by_name["Gate"].full_name
_PREFIX = f"/{SERVICE}/"

FoundHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"  # None: no such method
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"

logger = logging.getLogger(__name__)


class RequireProof(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call without a good proof, but to ``Challenge``."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._refusals = Refusals()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[FoundHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> FoundHandler:
        method = handler_call_details.method
        if not method.startswith(_PREFIX):
            try:
                self._gate.check(method, proof_in(handler_call_details.invocation_metadata))
            except UnauthenticatedError as error:
                return self._refusal(error)
        return await continuation(handler_call_details)

    def _refusal(self, error: UnauthenticatedError) -> FoundHandler:
        async def refuse(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
        ) -> None:
            log_refusal(self._refusals, self._clock, context.peer(), error)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

        # A method that takes a stream reads nothing by itself.
        return grpc.stream_unary_rpc_method_handler(refuse)


class GateServicer(gate_pb2_grpc.GateServicer):
    """``Challenge`` of an asyncio server."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def Challenge(
        self,
        request: gate_pb2.ChallengeRequest,
        context: "grpc.aio.ServicerContext[gate_pb2.ChallengeRequest, gate_pb2.ChallengeReply]",
    ) -> gate_pb2.ChallengeReply:
        try:
            return reply_to(self._gate, request)
        except UnauthenticatedError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


class ThreadedGate(gate_pb2_grpc.GateServicer):
    """The gate of a server with threads: ``Challenge``, and ``check`` in each handler."""

    def __init__(self, secret: str) -> None:
        self._clock = MonotonicClock()
        self._lock = Lock()
        self._gate = Gate(secret, self._clock)
        self._refusals = Refusals()

    def Challenge(
        self, request: gate_pb2.ChallengeRequest, context: grpc.ServicerContext
    ) -> gate_pb2.ChallengeReply:
        try:
            return reply_to(self._gate, request)
        except UnauthenticatedError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise AssertionError("abort raises") from error

    def check(self, method: str, context: grpc.ServicerContext) -> None:
        """Ends the call, by what gRPC's ``abort`` raises, where its proof is not good."""
        try:
            with self._lock:
                self._gate.check(method, proof_in(context.invocation_metadata()))
        except UnauthenticatedError as error:
            with self._lock:
                log_refusal(self._refusals, self._clock, context.peer(), error)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


def reply_to(gate: Gate, request: gate_pb2.ChallengeRequest) -> gate_pb2.ChallengeReply:
    """Raises UnauthenticatedError."""
    challenge = gate.challenge(request.nonce)
    return gate_pb2.ChallengeReply(nonce=challenge.nonce, proof=challenge.proof)


def proof_in(metadata: Metadata) -> bytes | None:
    """What a call's metadata hold."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            return value
    return None


def log_refusal(refusals: Refusals, clock: Clock, peer: str, error: UnauthenticatedError) -> None:
    """One line a while."""
    if line := refusals.note(f"caller at {peer} refused: {error}", clock.now_s()):
        logger.warning("%s", line)
