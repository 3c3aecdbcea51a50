"""How processes reach each other: channels and servers, with the options that sessions need.

An argument of whatever connects or listens: real code takes ``GrpcNetwork``, a simulation joins
both ends in memory.
"""

from typing import Protocol

import grpc

from pdserve.core.clock import MonotonicClock
from pdserve.core.cluster_access import ClusterAccess
from pdserve.rpc.gate import Gate
from pdserve.rpc.gate_client import ProveStreams, ProveWatches
from pdserve.rpc.gate_server import GateServicer, RequireProof
from pdserve.rpc.session import CHANNEL_OPTIONS
from pdserve.rpc.tls import channel_credentials, member_options, server_credentials
from pdserve.rpc.v1 import gate_pb2_grpc


class Network(Protocol):
    """Makes both ends of sessions."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to ``host:port``; it connects when it is used."""

    def server(self) -> grpc.aio.Server:
        """A server that listens nowhere yet."""

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Listen at ``host:port``, where port 0 is any; the port. Raises RuntimeError where it is
        taken.
        """


class GrpcNetwork:
    """gRPC over TCP, for processes of one cluster: those that share ``access``.

    Without one, whoever reaches an address may speak, and all is in the clear.
    """

    def __init__(self, access: ClusterAccess | None = None) -> None:
        self._access = access

    def channel(self, address: str) -> grpc.aio.Channel:
        if self._access is None:
            return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        secret = self._access.secret

        def open_plain() -> grpc.aio.Channel:
            return self._channel(address, ())

        return self._channel(
            address, (ProveStreams(secret, open_plain), ProveWatches(secret, open_plain))
        )

    def server(self) -> grpc.aio.Server:
        if self._access is None:
            return grpc.aio.server(options=CHANNEL_OPTIONS)
        clock = MonotonicClock()
        gate = Gate(self._access.secret, clock)
        server = grpc.aio.server(options=CHANNEL_OPTIONS, interceptors=[RequireProof(gate, clock)])
        gate_pb2_grpc.add_GateServicer_to_server(GateServicer(gate), server)
        return server

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        if self._access is None or self._access.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(self._access.tls))

    def _channel(
        self, address: str, interceptors: tuple[grpc.aio.ClientInterceptor, ...]
    ) -> grpc.aio.Channel:
        assert self._access is not None
        if self._access.tls is None:
            return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS, interceptors=interceptors)
        return grpc.aio.secure_channel(
            address,
            channel_credentials(self._access.tls),
            (*CHANNEL_OPTIONS, *member_options()),
            interceptors=interceptors,
        )
