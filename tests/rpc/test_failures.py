"""Errors through a gRPC status and trailing metadata."""

import grpc
import pytest

from pdserve.core.errors import (
    InternalError,
    InvalidRequestError,
    NeverFitsError,
    NoNodeError,
    OverloadedError,
    PdserveError,
    RequestAbortedError,
)
from pdserve.rpc.failures import error_of, metadata_of, status_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("n", "got 0"), grpc.StatusCode.INVALID_ARGUMENT),
        (NeverFitsError("prompt", "too long"), grpc.StatusCode.INVALID_ARGUMENT),
        (NoNodeError("none"), grpc.StatusCode.UNAVAILABLE),
        (OverloadedError("full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (InternalError("fault"), grpc.StatusCode.INTERNAL),
    ],
)
def test_status_text_and_metadata_make_the_error_again(
    error: PdserveError, status: grpc.StatusCode
) -> None:
    assert status_of(error) is status
    again = error_of(status, str(error), metadata_of(error))
    assert (type(again), str(again)) == (type(error), str(error))
    if isinstance(again, OverloadedError):
        assert again.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, NoNodeError),
        (grpc.StatusCode.CANCELLED, RequestAbortedError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_a_status_alone_makes_the_nearest_error(
    status: grpc.StatusCode, cls: type[PdserveError]
) -> None:
    assert type(error_of(status, "x: y", [("other", b"\x00")])) is cls


def test_a_retry_time_that_is_no_number_is_ignored() -> None:
    error = error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("retry-after-s", "soon")])
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 1.0
