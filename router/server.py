"""A running router: node sessions, dispatcher, HTTP and gRPC, started and closed together."""

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import uvicorn

from pdserve.core.clock import Clock, MonotonicClock
from pdserve.core.config import RouterConfig
from pdserve.core.errors import ConfigError
from pdserve.core.node import NodeAddress, NodeStanding
from pdserve.rpc.network import GrpcNetwork, Network
from pdserve.rpc.session import DEFAULT_SILENCE_S
from pdserve.telemetry.traces import Tracer
from pdserve.text.chat_template import ChatTemplate
from pdserve.text.tokenizer import Tokenizer
from router.admission import Admission
from router.api_keys import ApiKeys
from router.callers import Callers
from router.channel import Channels
from router.dispatch import Dispatcher
from router.grammar_checks import GrammarChecks
from router.grpc_server import PublicGrpcServer, start_grpc_server
from router.head_room import HeadRoom
from router.http_guard import GuardedProtocol
from router.http_idle import IdleConnections
from router.intake import Intake
from router.legs import Legs
from router.live_page import keep_samples
from router.metrics import Metrics
from router.openai_http import make_app
from router.orders import Orders
from router.policy import make_policy
from router.prefix_index import PrefixIndex
from router.roster import Roster
from router.routing import Routing
from router.service import RouterSpec, Service
from router.spans import RequestSpans

LISTEN_BACKLOG = 2048
FACE_GRACE_S = 1.0  # for the last bytes of answers that are over

logger = logging.getLogger(__name__)


class Router:
    """A router that serves. ``start_router`` makes it."""

    def __init__(
        self,
        service: Service,
        http_server: uvicorn.Server,
        http_socket: socket.socket,
        grpc_server: PublicGrpcServer,
    ) -> None:
        self._service = service
        self._http_server = http_server
        self._http_socket = http_socket
        self._grpc_server = grpc_server
        self._following = asyncio.create_task(
            service.dispatcher.run(service.channels.news), name="dispatcher"
        )
        self._serving = asyncio.create_task(
            http_server.serve(sockets=[http_socket]), name="HTTP server"
        )
        self._sampling = asyncio.create_task(keep_samples(service), name="samples")

    @property
    def http_address(self) -> str:
        """host:port"""
        return f"{self._service.spec.config.host}:{self._http_socket.getsockname()[1]}"

    @property
    def grpc_address(self) -> str:
        """host:port"""
        return f"{self._service.spec.config.host}:{self._grpc_server.port}"

    @property
    def closing(self) -> bool:
        """True once it takes in nothing more."""
        return self._service.dispatcher.closing

    def set_nodes(self, nodes: Iterable[NodeAddress]) -> None:
        """These are the cluster's nodes from now on."""
        self._service.channels.set_nodes(nodes)

    def set_standings(self, standings: Iterable[NodeStanding]) -> None:
        """So the cluster's nodes stand from now on, those included that do not run."""
        self._service.roster.set(standings)

    @property
    def orders(self) -> Orders:
        """What operators ask for."""
        return self._service.orders

    async def close(self, grace_s: float) -> None:
        """Take in nothing more, let requests end within ``grace_s``, end the rest, stop."""
        await self._service.dispatcher.close(grace_s)
        await self._grpc_server.close(FACE_GRACE_S)
        self._http_server.should_exit = True
        await self._serving
        await self._service.channels.close()
        self._service.grammar_checks.close()
        for task in (self._following, self._sampling):
            task.cancel()
        await asyncio.gather(self._following, self._sampling, return_exceptions=True)


async def start_router(
    spec: RouterSpec,
    clock: Clock | None = None,
    silence_s: float = DEFAULT_SILENCE_S,
    tracer: Tracer | None = None,
) -> Router:
    """Serve HTTP and gRPC. It is ready once its nodes are. ``tracer``: None traces nothing.

    Raises ConfigError for an unknown policy or a taken port, ModelFilesError for a damaged
    tokenizer.
    """
    clock = clock or MonotonicClock()
    network = GrpcNetwork(spec.access)
    service = make_service(spec, clock, silence_s, network, new_id=_random_id, tracer=tracer)
    http_server = _http_server(service)
    http_socket = _listen(spec.config)
    try:
        grpc_server = await start_grpc_server(service)
    except ConfigError:
        http_socket.close()
        raise
    router = Router(service, http_server, http_socket, grpc_server)
    router.set_nodes(spec.nodes)
    logger.info("HTTP on %s, gRPC on %s", router.http_address, router.grpc_address)
    return router


def make_service(
    spec: RouterSpec,
    clock: Clock,
    silence_s: float,
    network: Network,
    *,
    new_id: Callable[[], str],
    tracer: Tracer | None = None,
) -> Service:
    """All of a router but its faces. ``new_id`` names requests, each like no other."""
    tokenizer = Tokenizer(spec.model_dir)
    limits = spec.config.limits
    channels = Channels(
        router_id=new_id(),
        model_fingerprint=spec.model.fingerprint,
        silence_s=silence_s,
        clock=clock,
        network=network,
    )
    routing = Routing(
        make_policy(spec.config, prefill_configured=spec.prefill_configured),
        PrefixIndex(spec.config.prefix),
        spec.caching,
    )
    head_room = HeadRoom(limits, headroom_tokens=spec.headroom_tokens)
    metrics = Metrics()
    grammar_checks = GrammarChecks(spec.model_dir, spec.model, limits)
    return Service(
        spec=spec,
        created_s=int(time.time()),
        clock=clock,
        tokenizer=tokenizer,
        intake=Intake(
            tokenizer=tokenizer,
            template=ChatTemplate(spec.model_dir),
            vocab_size=spec.model.vocab_size,
            served_name=spec.served_name,
            limits=limits,
            grammar_checks=grammar_checks,
            tool_call_format=spec.config.tool_call_format,
        ),
        grammar_checks=grammar_checks,
        channels=channels,
        roster=Roster(channels),
        orders=Orders(),
        routing=routing,
        dispatcher=Dispatcher(
            legs=Legs(
                channels,
                routing,
                head_room,
                max_prefill_wait_s=limits.max_prefill_wait_s,
                metrics=metrics.routing,
                clock=clock,
            ),
            admission=Admission(limits, spec.config.classes),
            metrics=metrics,
            limits=limits,
            clock=clock,
            new_id=new_id,
            spans=RequestSpans(tracer, spec.served_name),
        ),
        metrics=metrics,
        callers=Callers(_api_keys(spec, clock), clock),
    )


def _api_keys(spec: RouterSpec, clock: Clock) -> ApiKeys | None:
    file = spec.security.api_keys_file
    if spec.api_keys is None and file is None:
        return None
    return ApiKeys(spec.api_keys or (), Path(file) if file is not None else None, clock)


def _random_id() -> str:
    return uuid.uuid4().hex


def _listen(config: RouterConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server(
            (config.host, config.http_port), family=family, backlog=LISTEN_BACKLOG
        )
    except OSError as error:
        raise ConfigError(
            f"router.http_port: cannot listen on {config.host}:{config.http_port}: "
            f"{error.strerror or error}"
        ) from error
    # Connections inherit it; asyncio sets it only on sockets that name their protocol. Without it a
    # stream's first event waits 40 ms for the client's acknowledgement of the head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Likewise: who takes nothing of what is sent for so long is cut off, whoever waits for it then,
    # also where all was said and the connection is only to be closed.
    stall_ms = max(1, round(config.limits.client_stall_s * 1000))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    return listening


class _HttpServer(uvicorn.Server):
    """Signals belong to the process that runs the router, not to its HTTP server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(service: Service) -> uvicorn.Server:
    security, limits = service.spec.security, service.spec.config.limits
    config = uvicorn.Config(
        make_app(service),
        http=partial(GuardedProtocol, limits=limits, idle=IdleConnections()),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # a time like others
        timeout_graceful_shutdown=int(FACE_GRACE_S),
        server_header=False,
        ssl_certfile=security.tls_certificate,
        ssl_keyfile=security.tls_key,
    )
    _load(config)
    return _HttpServer(config)


def _load(config: uvicorn.Config) -> None:
    """What uvicorn would do later. Raises ConfigError where the certificate cannot be used."""
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(
            f"security.tls_certificate: {config.ssl_certfile} and security.tls_key: "
            f"{config.ssl_keyfile} cannot be used: {reason}"
        ) from error
