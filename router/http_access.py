"""Who may call which HTTP route.

    /health, /ready                   everybody: probes
    /, /live/…                        everybody: the live page, whose data is at /admin/live
    /metrics, /admin/…, /debug/…      operators: a key of theirs, or the cluster's admin token
    all others, unknown ones too      who has an API key

Without API keys everybody may call everything; orders need the admin token always
(``admin_http.py``), which no key stands for.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.core.errors import PermissionDeniedError, UnauthenticatedError
from router.callers import Callers
from router.http_bodies import error_response

PUBLIC = frozenset({"/health", "/ready", "/"})
PUBLIC_FILES = "/live/"
ORDERS = frozenset({"/admin/drain", "/admin/scale", "/admin/role"})
NEEDS_TOKEN = (
    "this needs the cluster's admin token: `admin_token` of the run file on the host of `pdserve "
    "serve` (`--token`)"
)
OPERATORS = ("/metrics", "/admin/", "/debug/")


class RequireKey:
    """ASGI middleware: who may not call is answered here, before its body is read."""

    def __init__(self, app: ASGIApp, *, callers: Callers, admin_token: str | None) -> None:
        self._app = app
        self._callers = callers
        self._admin_token = admin_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_public(scope["path"]):
            try:
                self._check(scope["path"], Headers(scope=scope).get("authorization"))
            except (UnauthenticatedError, PermissionDeniedError) as error:
                self._callers.refused(_peer(scope), error)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, authorization: str | None) -> None:
        for_operators = path.startswith(OPERATORS)
        if for_operators and has_token(authorization, self._admin_token):
            return
        if path in ORDERS:
            raise UnauthenticatedError(NEEDS_TOKEN)
        caller = self._callers.caller(authorization)
        if for_operators and not caller.is_operator:
            raise PermissionDeniedError("this is for operators: their key, or the admin token")


def _is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(PUBLIC_FILES)


def has_token(authorization: str | None, token: str | None) -> bool:
    """Whether an ``Authorization`` header holds the cluster's admin token."""
    given = (authorization or "").encode(errors="surrogateescape")
    return token is not None and hmac.compare_digest(given, f"Bearer {token}".encode())


def _peer(scope: Scope) -> str:
    host: str = (scope.get("client") or ("unknown", 0))[0]
    return host
