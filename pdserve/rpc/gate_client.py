"""The caller's side of a node's gate: ask for a challenge, answer it with the call."""

from collections.abc import Callable
from typing import Any

import grpc

from pdserve.core.errors import UnauthenticatedError
from pdserve.rpc.gate import METADATA_KEY, Challenge, answer, new_nonce
from pdserve.rpc.v1 import gate_pb2, gate_pb2_grpc

CHALLENGE_TIMEOUT_S = 10.0


class _ProvingError(grpc.RpcError):
    """As the node itself would have refused the call."""


class _Prover:
    """Makes the metadata of a call, over a channel of its own."""

    def __init__(self, secret: str, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._secret = secret
        self._open_channel = open_channel

    async def proven(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        method = _text(details.method)
        nonce = new_nonce()
        async with self._open_channel() as channel:
            stub: Any = gate_pb2_grpc.GateStub(channel)
            request = gate_pb2.ChallengeRequest(nonce=nonce)
            reply = await stub.Challenge(request, timeout=CHALLENGE_TIMEOUT_S)
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(METADATA_KEY, _answer(self._secret, method, nonce, reply))
        return grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )


class ProveStreams(grpc.aio.StreamStreamClientInterceptor):
    """For sessions. Raises grpc.RpcError where the node has another secret."""

    def __init__(self, secret: str, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._prover = _Prover(secret, open_channel)

    async def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,  # noqa: ANN401 - of messages
    ) -> "grpc.aio.StreamStreamCall[Any, Any]":
        details = await self._prover.proven(client_call_details)
        call: grpc.aio.StreamStreamCall[Any, Any] = await continuation(details, request_iterator)
        return call


class ProveWatches(grpc.aio.UnaryStreamClientInterceptor):
    """For a router that watches a prefill node; likewise."""

    def __init__(self, secret: str, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._prover = _Prover(secret, open_channel)

    async def intercept_unary_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,  # noqa: ANN401 - a message
    ) -> "grpc.aio.UnaryStreamCall[Any, Any]":
        details = await self._prover.proven(client_call_details)
        call: grpc.aio.UnaryStreamCall[Any, Any] = await continuation(details, request)
        return call


def prove(channel: grpc.Channel, secret: str, method: str) -> tuple[tuple[str, bytes], ...]:
    """The metadata of a call over ``channel``, from a thread. Raises grpc.RpcError."""
    nonce = new_nonce()
    stub = gate_pb2_grpc.GateStub(channel)
    request = gate_pb2.ChallengeRequest(nonce=nonce)
    reply = stub.Challenge(request, timeout=CHALLENGE_TIMEOUT_S)
    return ((METADATA_KEY, _answer(secret, method, nonce, reply)),)


def _text(method: str | bytes) -> str:
    """gRPC's own code has bytes where its types say text."""
    return method.decode() if isinstance(method, bytes) else method


def _answer(secret: str, method: str, nonce: bytes, reply: gate_pb2.ChallengeReply) -> bytes:
    challenge = Challenge(nonce=reply.nonce, proof=reply.proof)
    try:
        return answer(secret, method, nonce, challenge)
    except UnauthenticatedError as error:
        raise _ProvingError(str(error)) from error
