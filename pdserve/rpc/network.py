"""How processes reach each other: channels and servers, with the options that sessions need.

An argument of whatever connects or listens: real code takes ``GrpcNetwork``, a simulation joins
both ends in memory.
"""

from typing import Protocol

import grpc

from pdserve.rpc.session import CHANNEL_OPTIONS


class Network(Protocol):
    """Makes both ends of sessions."""

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to ``host:port``; it connects when it is used."""

    def server(self) -> grpc.aio.Server:
        """A server that listens nowhere yet."""


class GrpcNetwork:
    """gRPC over TCP."""

    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)

    def server(self) -> grpc.aio.Server:
        return grpc.aio.server(options=CHANNEL_OPTIONS)
