"""Errors cross between processes as plain values and come out as what they were."""

import pickle

import pytest

from pdserve.cluster.outcome import Failure, failure_of
from pdserve.core.errors import (
    ConfigError,
    HandshakeError,
    InternalError,
    OverloadedError,
    PdserveError,
    RankError,
)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("prefill.device: wrong"),
        RankError("rank 0 died"),
        HandshakeError("dtype", ours="float32", theirs="bfloat16", cure="same dtype"),
        OverloadedError("full", retry_after_s=3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_ours_keeps_its_class_and_text(error: PdserveError) -> None:
    failure = pickle.loads(pickle.dumps(failure_of(error)))
    assert type(failure.error()) is type(error)
    assert str(failure.error()) == str(error)


def test_any_other_error_is_a_fault_of_ours() -> None:
    failure = failure_of(KeyError("slot"))
    assert failure == Failure(kind="internal_error", message="KeyError('slot')")
    assert type(failure.error()) is InternalError
