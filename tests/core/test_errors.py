"""The errors' kinds and statuses, and that an error survives the trip to another process."""

import inspect
import re

import pytest

from pdserve.core import errors
from pdserve.core.errors import (
    HandshakeError,
    InvalidRequestError,
    NeverFitsError,
    OverloadedError,
    PdserveError,
    UnknownModelError,
)
from pdserve.core.failures import error_of_kind

ALL = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, PdserveError) and cls is not PdserveError
}


def documented() -> dict[str, tuple[str, str]]:
    """Class → (HTTP, gRPC) from the tree in the module's docstring; "" where it says nothing."""
    rows: dict[str, tuple[str, str]] = {}
    for line in (errors.__doc__ or "").splitlines():
        if "── " in line:
            name, *columns = re.split(r" {2,}", line.partition("── ")[2])
            statuses = [c for c in columns[:2] if c == "–" or c.isdigit() or c.isupper()]
            rows[name] = (statuses[0], statuses[1]) if len(statuses) == 2 else ("", "")
    return rows


def make(cls: type[PdserveError]) -> PdserveError:
    match cls.__name__:
        case "InvalidRequestError" | "NeverFitsError":
            return cls("max_tokens", "got -1, allowed are 1 and more")
        case "UnknownModelError":
            return UnknownModelError("gpt-9", "smollm2")
        case "OverloadedError":
            return OverloadedError("queue full", retry_after_s=3.0)
        case "HandshakeError":
            return HandshakeError("block_size", ours=16, theirs=32, cure="use the same")
        case _:
            return cls("what happened")


def test_the_tree_in_the_docstring_names_every_class():
    assert set(documented()) == set(ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_statuses_are_those_of_the_tree(name: str):
    http, grpc = documented()[name]
    if not http:  # a special case of its parent
        assert "http_status" not in vars(ALL[name])
    elif http != "–":  # never seen by a client
        assert (str(ALL[name].http_status), ALL[name].grpc_status) == (http, grpc)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (make(InvalidRequestError), "invalid_request_error"),
        (make(NeverFitsError), "never_fits_error"),
        (make(OverloadedError), "overloaded_error"),
        (make(errors.NodeLostError), "node_lost_error"),
        (make(errors.InternalError), "internal_error"),
    ],
)
def test_a_kind_is_the_class_in_snake_case(error: PdserveError, kind: str):
    assert error.kind == kind


def test_every_class_has_a_kind_of_its_own():
    assert len({make(cls).kind for cls in ALL.values()}) == len(ALL)


@pytest.mark.parametrize("name", sorted(ALL))
def test_an_error_comes_back_from_its_kind_and_message(name: str):
    sent = make(ALL[name])
    got = error_of_kind(sent.kind, str(sent), retry_after_s=3.0)
    assert type(got) is type(sent)
    assert str(got) == str(sent)
    assert vars(got) == vars(sent)


def test_an_unknown_kind_comes_back_as_a_fault_of_ours():
    got = error_of_kind("from_the_future_error", "hello")
    assert (type(got), str(got)) == (errors.InternalError, "hello")


def test_messages_name_the_field_and_both_sides():
    assert str(make(InvalidRequestError)) == "max_tokens: got -1, allowed are 1 and more"
    assert str(make(HandshakeError)) == (
        "handshake: block_size differs: here 16, there 32; use the same"
    )
    assert str(make(UnknownModelError)) == (
        "model: 'gpt-9' is not served here; the served model is 'smollm2'"
    )
    assert len(str(UnknownModelError("x" * 10_000, "smollm2"))) < 200
