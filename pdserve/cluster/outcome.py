"""Errors as plain values, for the way between processes: not every exception can be pickled, and a
pickled one needs its class on the other side.
"""

from dataclasses import dataclass

from pdserve.core.errors import InternalError, PdserveError
from pdserve.core.failures import error_of_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that happened elsewhere."""

    kind: str
    message: str

    def error(self) -> PdserveError:
        return error_of_kind(self.kind, self.message)


def failure_of(error: Exception) -> Failure:
    """What to send instead of ``error``."""
    if isinstance(error, PdserveError):
        return Failure(kind=error.kind, message=str(error))
    return Failure(kind=InternalError("").kind, message=repr(error))
