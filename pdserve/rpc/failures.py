"""Errors of the public gRPC API: a status and text for everybody, and in the trailing metadata what
a client of ours needs to raise the same error again.
"""

from collections.abc import Iterable

import grpc

from pdserve.core.errors import OverloadedError, PdserveError
from pdserve.core.failures import DEFAULT_RETRY_AFTER_S, error_of_kind

KIND_KEY = "pdserve-error-kind"
RETRY_AFTER_KEY = "retry-after-s"

# For servers, or proxies on the way, that say no kind.
_KINDS_OF_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid_request_error",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated_error",
    grpc.StatusCode.PERMISSION_DENIED: "permission_denied_error",
    grpc.StatusCode.NOT_FOUND: "unknown_model_error",
    grpc.StatusCode.DEADLINE_EXCEEDED: "queue_deadline_error",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded_error",
    grpc.StatusCode.CANCELLED: "request_aborted_error",
    grpc.StatusCode.UNAVAILABLE: "no_node_error",
    grpc.StatusCode.FAILED_PRECONDITION: "handshake_error",
}


def status_of(error: PdserveError) -> grpc.StatusCode:
    """The status that ``pdserve/core/errors.py`` gives the error."""
    return grpc.StatusCode[error.grpc_status]


def metadata_of(error: PdserveError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that go with the status."""
    kind = (KIND_KEY, error.kind)
    if isinstance(error, OverloadedError):
        return kind, (RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}")
    return (kind,)


def error_of(
    status: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, str | bytes]]
) -> PdserveError:
    """The error that a call's status, text and trailing metadata stand for."""
    told = {key: value for key, value in metadata if isinstance(value, str)}
    kind = told.get(KIND_KEY) or _KINDS_OF_STATUS.get(status, "internal_error")
    return error_of_kind(kind, details, retry_after_s=_seconds(told.get(RETRY_AFTER_KEY)))


def _seconds(text: str | None) -> float:
    try:
        return float(text or DEFAULT_RETRY_AFTER_S)
    except ValueError:
        return DEFAULT_RETRY_AFTER_S
