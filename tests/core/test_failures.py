"""Errors that crossed a process border are the same errors again."""

import pytest

from pdserve.core import errors
from pdserve.core.errors import PdserveError
from pdserve.core.failures import error_of_kind

SOME = [
    errors.InvalidRequestError("top_p", "got 2, allowed are numbers above 0, at most 1"),
    errors.NeverFitsError("prompt", "it has 9 tokens"),
    errors.UnknownModelError("a", "b"),
    errors.OverloadedError("full", retry_after_s=3.0),
    errors.NodeLostError("decode-0: gone"),
    errors.HandshakeError("dtype", ours="a", theirs="b", cure="c"),
]


@pytest.mark.parametrize("error", SOME, ids=lambda error: type(error).__name__)
def test_kind_and_message_make_the_error_again(error: PdserveError) -> None:
    again = error_of_kind(error.kind, str(error), retry_after_s=3.0)
    assert type(again) is type(error)
    assert str(again) == str(error)
    if isinstance(error, errors.InvalidRequestError):
        assert isinstance(again, errors.InvalidRequestError)
        assert again.field == error.field
    if isinstance(error, errors.OverloadedError):
        assert isinstance(again, errors.OverloadedError)
        assert again.retry_after_s == error.retry_after_s


def test_every_error_has_a_kind_of_its_own() -> None:
    def below(cls: type[PdserveError]) -> set[type[PdserveError]]:
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    for cls in below(PdserveError):
        if cls.__module__ == errors.__name__:
            assert type(error_of_kind(cls.__new__(cls).kind, "what happened")) is cls


def test_an_unknown_kind_is_a_fault_with_its_message() -> None:
    error = error_of_kind("of_another_version", "what happened")
    assert type(error) is errors.InternalError
    assert str(error) == "what happened"
