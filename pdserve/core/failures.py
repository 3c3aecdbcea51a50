"""From an error's kind and message, as they crossed a process border, back to the error.

The other direction is ``PdserveError.kind`` and ``str()``.
"""

from pdserve.core.breaker import Duty
from pdserve.core.errors import (
    HandshakeError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdserveError,
    PrefillFailedError,
    TransferError,
    UnknownModelError,
)

DEFAULT_RETRY_AFTER_S = 1.0
FIRST_SERVER_STATUS = 500  # of HTTP; below it, the request is at fault


def error_of_kind(
    kind: str, message: str, *, retry_after_s: float = DEFAULT_RETRY_AFTER_S
) -> PdserveError:
    """The error whose ``kind`` and ``str()`` these are; an InternalError where none has that
    kind.
    """
    cls = _KINDS.get(kind, InternalError)
    error = cls.__new__(cls)
    Exception.__init__(error, message)  # classes with a constructor of their own compose the text
    if isinstance(error, (InvalidRequestError, UnknownModelError)):
        error.field = message.partition(": ")[0]
    if isinstance(error, HandshakeError):
        error.field = message.removeprefix("handshake: ").partition(" differs: ")[0]
    if isinstance(error, OverloadedError):
        error.retry_after_s = retry_after_s
    return error


def duty_blamed(kind: str, *, own: Duty) -> Duty | None:
    """The stage that such a failure of a leg speaks against: ``own`` is the one that was asked.

    None: what the request itself was refused for, which speaks against nobody.
    """
    error = error_of_kind(kind, "")
    if error.http_status < FIRST_SERVER_STATUS:
        return None
    if isinstance(error, TransferError):
        return Duty.LINK
    return Duty.PREFILL if isinstance(error, PrefillFailedError) else own


def _kinds(cls: type[PdserveError]) -> dict[str, type[PdserveError]]:
    found = {cls.__new__(cls).kind: cls}
    for child in cls.__subclasses__():
        found |= _kinds(child)
    return found


_KINDS = _kinds(PdserveError)
