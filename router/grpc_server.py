"""The public gRPC service: what HTTP offers, without HTTP. Dropping a stream aborts its request.

Also serves grpc.health.v1, whose word follows the router's readiness, and reflection.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import ConfigError, InvalidRequestError, PdserveError
from pdserve.core.security_config import SecurityConfig
from pdserve.rpc.tls import public_credentials
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc
from router.choice_text import Delta
from router.generation import Generation, GenerationRequest
from router.grpc_access import PUBLIC, RequireKey, authorization_of, traceparent_of
from router.grpc_calls import GrpcAnswer
from router.grpc_decoding import ReadOneMessage, fail
from router.grpc_health import Health
from router.grpc_limits import BoundMetadata, public_options
from router.grpc_messages import (
    conversation,
    last_message,
    node_load,
    prompt_of,
    request_fields,
)
from router.grpc_shares import BoundCalls
from router.http_labels import clean_label
from router.intake import Conversation
from router.service import Service, version
from router.validation import check_interval

LOADS_INTERVAL_S = 1.0
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class PublicGrpcServer:
    """The server and the task that keeps its health word true."""

    def __init__(self, server: grpc.aio.Server, port: int, following: asyncio.Task[None]) -> None:
        self.port = port
        self._server = server
        self._following = following

    async def close(self, grace_s: float) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._server.stop(grace_s)


async def start_grpc_server(service: Service) -> PublicGrpcServer:
    """Serve. Raises ConfigError where the port is taken."""
    limits = service.spec.config.limits
    interceptors = [
        BoundMetadata(limits.max_headers),
        RequireKey(service.callers),
        BoundCalls(own=f"/{SERVICE_NAME}/", public=PUBLIC, max_calls=limits.max_grpc_calls),
        ReadOneMessage(timeout_s=limits.body_timeout_s),
    ]
    server = grpc.aio.server(interceptors=interceptors, options=public_options(limits))
    health_servicer = Health(["", SERVICE_NAME])
    inference_pb2_grpc.add_InferenceServicer_to_server(_Inference(service), server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    config = service.spec.config
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = _bind(server, f"{host}:{config.grpc_port}", service.spec.security)
    except RuntimeError as error:
        raise ConfigError(
            f"router.grpc_port: cannot listen on {config.host}:{config.grpc_port}; is it in use?"
        ) from error
    await server.start()
    following = asyncio.create_task(_follow_readiness(service, health_servicer))
    return PublicGrpcServer(server, port, following)


def _bind(server: grpc.aio.Server, address: str, security: SecurityConfig) -> int:
    if security.tls_certificate is None or security.tls_key is None:
        return server.add_insecure_port(address)
    credentials = public_credentials(security.tls_certificate, security.tls_key)
    return server.add_secure_port(address, credentials)


async def _follow_readiness(service: Service, servicer: Health) -> None:
    while True:
        servicer.set(serving=service.readiness().ready)
        await service.dispatcher.nodes_changed.wait()
        service.dispatcher.nodes_changed.clear()


class _Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        service, arrived_s = self._service, self._service.clock.now_s()
        try:
            asked = await self._request(request)
            generating = service.generate(
                [asked],
                label=clean_label(request.label),
                authorization=authorization_of(context.invocation_metadata()),
                arrived_s=arrived_s,
                traceparent=traceparent_of(context.invocation_metadata()),
            )
            with generating as generation:
                answer = GrpcAnswer(asked, generation.request_ids[0], service.tokenizer)
                async for deltas in _answers(generation, whole=asked.best_of is not None):
                    for delta in deltas:
                        for message in answer.messages(delta):
                            with self._dropping_stalled():
                                yield message
                yield last_message(generation, timeline=request.timeline)
        except PdserveError as error:
            await fail(context, error)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        authorization = authorization_of(context.invocation_metadata())
        found = self._service.abort(request.request_id, authorization=authorization)
        return pb.AbortResponse(found=found)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        spec = self._service.spec
        return pb.GetModelInfoResponse(
            model=spec.served_name,
            architecture=spec.model.architecture,
            dtype=spec.dtype,
            vocab_size=spec.model.vocab_size,
            max_model_len=self._service.max_model_len(),
            eos_token_ids=spec.model.eos_token_ids,
            bos_token_id=spec.model.bos_token_id,
            fingerprint=spec.model.fingerprint,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        state = self._service.readiness()
        routes = {route.value: n for route, n in self._service.metrics.routes.items()}
        return pb.GetServerInfoResponse(
            version=version(), ready=state.ready, reason=state.reason or "", routes=routes
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return self._loads()

    async def WatchLoads(
        self, request: pb.WatchLoadsRequest, context: Context
    ) -> AsyncIterator[pb.GetLoadsResponse]:
        interval_s = request.interval_s if request.HasField("interval_s") else LOADS_INTERVAL_S
        try:
            check_interval("interval_s", interval_s)
        except PdserveError as error:
            await fail(context, error)
        while True:
            with self._dropping_stalled():
                yield self._loads()
            await asyncio.sleep(interval_s)  # the pace that was asked for

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        try:
            ids = await self._tokenize(request)
        except PdserveError as error:
            await fail(context, error)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._service.max_model_len())

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        try:
            text = await self._service.intake.detokenize(request.token_ids, "token_ids")
            return pb.DetokenizeResponse(text=text)
        except PdserveError as error:
            await fail(context, error)

    def _loads(self) -> pb.GetLoadsResponse:
        views = self._service.channels.views()
        return pb.GetLoadsResponse(nodes=[node_load(view) for view in views])

    @contextmanager
    def _dropping_stalled(self) -> Iterator[None]:
        """End this call when its client takes nothing for ``client_stall_s``."""
        call = asyncio.current_task()
        assert call is not None
        stall_s = self._service.spec.config.limits.client_stall_s
        dropping = asyncio.get_running_loop().call_later(stall_s, call.cancel)
        try:
            yield
        finally:
            dropping.cancel()

    async def _request(self, request: pb.GenerateRequest) -> GenerationRequest:
        intake, max_model_len = self._service.intake, self._service.max_model_len()
        intake.check_model(request.model or None)
        fields = request_fields(request, self._service.spec.config.limits.max_grammar_bytes)
        prompt = prompt_of(request)
        priority = request.priority if request.HasField("priority") else None
        if isinstance(prompt, Conversation):
            return await intake.chat(prompt, fields, max_model_len=max_model_len, priority=priority)
        added = request.add_special_tokens or not request.HasField("add_special_tokens")
        requests = await intake.completion(
            prompt,
            fields,
            add_special_tokens=added,
            default_max_tokens=None,
            max_model_len=max_model_len,
            priority=priority,
        )
        return requests[0]

    async def _tokenize(self, request: pb.TokenizeRequest) -> tuple[int, ...]:
        intake = self._service.intake
        match request.WhichOneof("input"):
            case "text":
                added = request.add_special_tokens or not request.HasField("add_special_tokens")
                intake.check_text("text", request.text, self._service.max_model_len())
                return await intake.tokenize(request.text, add_special_tokens=added)
            case "chat":
                chat = conversation(request.chat, request.add_special_tokens)
                intake.check_conversation(chat, self._service.max_model_len())
                return await intake.tokenize_chat(chat)
            case _:
                raise InvalidRequestError("input", "give one of text and chat")


async def _answers(generation: Generation, *, whole: bool) -> AsyncIterator[list[Delta]]:
    """The deltas as they come, or whole answers once all are there."""
    if whole:
        yield await generation.collect()
        return
    async for deltas in generation:
        yield deltas
