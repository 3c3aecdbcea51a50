"""Every error that pdserve raises on purpose, and what the client sees of it.

    PdserveError                      HTTP  gRPC                 handled by
    ├── InvalidRequestError           400   INVALID_ARGUMENT     router: names the field
    ├── NeverFitsError                400   INVALID_ARGUMENT     router: says what fits
    ├── UnauthenticatedError          401   UNAUTHENTICATED      router: no key, or none of ours
    ├── PermissionDeniedError         403   PERMISSION_DENIED    router: for operators' keys only
    ├── UnknownModelError             404   NOT_FOUND            router
    ├── QueueDeadlineError            408   DEADLINE_EXCEEDED    router: dropped before prefill
    ├── RequestTimeoutError           504   DEADLINE_EXCEEDED    router: ends it on its node
    ├── OverloadedError               429   RESOURCE_EXHAUSTED   router: with Retry-After
    ├── RequestAbortedError           499   CANCELLED            each owner frees
    ├── NoNodeError                   503   UNAVAILABLE          router
    ├── ShuttingDownError             503   UNAVAILABLE          router: ask another, or later
    ├── NodeLostError                 503   UNAVAILABLE          router: re-submits
    ├── PrefillFailedError            503   UNAVAILABLE          decode node: next of route
    ├── TransferError                 503   UNAVAILABLE          decode node: likewise
    │   ├── LinkDownError                                        the pair is remade
    │   ├── ChecksumError                                        the handoff fails
    │   └── TransferTimeoutError                                 the pair is remade
    ├── HandshakeError                503   FAILED_PRECONDITION  the pair stays apart
    ├── RankError                     500   INTERNAL             node: ends whole
    │   └── RingClosedError                                      the other side of a ring is gone
    ├── RayLostError                  –     –                    command line: all ends, exit 1
    ├── ConfigError                   –     –                    command line: exit 2
    ├── ModelFilesError               –     –                    command line: exit 2
    │   ├── ModelNotFoundError
    │   └── UnsupportedModelError
    └── InternalError                 500   INTERNAL             outermost loop: traceback logged

Owns the classes and the status of each; knows neither HTTP nor gRPC libraries.
"""


class PdserveError(Exception):
    """Root of all errors raised on purpose. ``str()`` is fit to be shown to a client."""

    http_status = 500
    grpc_status = "INTERNAL"

    @property
    def kind(self) -> str:
        """The class's name without ``Error`` in snake case: the ``type`` of an HTTP error body."""
        name = type(self).__name__.removesuffix("Error")
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_") + "_error"


class InvalidRequestError(PdserveError):
    """A field is wrong. The message names it, what was got and what is allowed."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class NeverFitsError(InvalidRequestError):
    """The request could not be served even by an idle system; the message says what fits."""


class UnauthenticatedError(PdserveError):
    """The caller has not said who it is in a way that is believed. Never names what it said."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class PermissionDeniedError(PdserveError):
    """The caller is known, and what it asks for is not for it."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class UnknownModelError(PdserveError):
    """The request names a model that is not served here."""

    http_status = 404
    grpc_status = "NOT_FOUND"

    def __init__(self, model: str, served: str) -> None:
        super().__init__(
            f"model: {model[:100]!r} is not served here; the served model is {served!r}"
        )
        self.field = "model"


class QueueDeadlineError(PdserveError):
    """The request waited longer than its class allows and was dropped before any prefill."""

    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class RequestTimeoutError(PdserveError):
    """The answer was begun, or a node had the request, but it did not end in time."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class OverloadedError(PdserveError):
    """Queues are full or decode has no head-room; try again after ``retry_after_s``."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAbortedError(PdserveError):
    """The client or an operator ended the request."""

    http_status = 499
    grpc_status = "CANCELLED"


class NoNodeError(PdserveError):
    """No node of the needed role is ready."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class ShuttingDownError(PdserveError):
    """The router is being stopped: it takes in nothing more, and ends what has no time left."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class NodeLostError(PdserveError):
    """The session with the node that held the request broke."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class PrefillFailedError(PdserveError):
    """No prefill node of the route could do the prefill, and local prefill is not allowed."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class TransferError(PdserveError):
    """A KV transfer failed; the handoff it belonged to fails by name."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class LinkDownError(TransferError):
    """The connection between a sender rank and a receiver rank is gone."""


class ChecksumError(TransferError):
    """A frame arrived with other bytes than were sent."""


class TransferTimeoutError(TransferError):
    """A transfer's deadline passed; its pair is closed."""


class HandshakeError(PdserveError):
    """Two nodes do not fit together."""

    http_status = 503
    grpc_status = "FAILED_PRECONDITION"

    def __init__(self, field: str, *, ours: object, theirs: object, cure: str) -> None:
        super().__init__(f"handshake: {field} differs: here {ours!r}, there {theirs!r}; {cure}")
        self.field = field


class RankError(PdserveError):
    """A rank process died, hung or reported a fatal error; its node ends whole."""


class RingClosedError(RankError):
    """The process at the other end of a ring has closed it or is dead."""


class RayLostError(PdserveError):
    """The Ray that a cluster runs on is gone; the message says what died and where its log is."""


class ConfigError(PdserveError):
    """The cluster file or a command-line override is wrong; the message names the key."""


class ModelFilesError(PdserveError):
    """A model directory is incomplete or damaged; the message names the file or tensor."""


class ModelNotFoundError(ModelFilesError):
    """``model.source`` is neither a directory nor a known name; the message lists those."""


class UnsupportedModelError(ModelFilesError):
    """The model needs what pdserve does not have; the message names it and lists what is known."""


class InternalError(PdserveError):
    """A fault of ours; the traceback is in the log."""
