"""Waiting until a router says that it can serve: grpc.health.v1, which follows its readiness."""

import asyncio
from pathlib import Path

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.core.errors import ConfigError, NoNodeError

# The router is on this host or in this cluster's network: no proxy belongs between.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


async def wait_until_ready(
    grpc_address: str, timeout_s: float, certificate: str | None = None
) -> None:
    """Return once the router is ready. Raises NoNodeError where it is not in time.

    ``certificate``: the router's own, which is all that it has to show; None: no TLS. Raises
    ConfigError where it is none.
    """
    async with _channel(grpc_address, certificate) as channel:
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


def _channel(address: str, certificate: str | None) -> grpc.aio.Channel:
    if certificate is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    try:
        pem = Path(certificate).read_bytes()
        name = _name_in(x509.load_pem_x509_certificate(pem))
    except (OSError, ValueError) as error:
        raise ConfigError(f"security.tls_certificate: {certificate}: {error}") from error
    named = () if name is None else (("grpc.ssl_target_name_override", name),)
    credentials = grpc.ssl_channel_credentials(pem)
    return grpc.aio.secure_channel(address, credentials, (*_OPTIONS, *named))


def _name_in(certificate: x509.Certificate) -> str | None:
    """One that the certificate is good for: gRPC compares names, whatever else it knows."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    texts = [*names.get_values_for_type(x509.DNSName), *addresses]
    return texts[0].replace("*", "any") if texts else None
