"""Who calls, by what its ``Authorization`` says, for HTTP and gRPC alike.

With API keys, a caller is the tenant whose key it has, or is refused. Without, everybody is let in
and a key only tells callers apart for fair sharing (``tenants.py``).
"""

import logging
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.errors import PermissionDeniedError, UnauthenticatedError
from pdserve.core.refusals import Refusals
from router.api_keys import ApiKeys
from router.tenants import Tenants, bearer_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """``is_known``: it has a key of ours; what is another tenant's is not for it."""

    tenant: str
    is_known: bool
    is_operator: bool

    def salt(self, own: bytes) -> bytes:
        """What its requests share cached KV by: ``own`` salt, among its tenant's requests only."""
        return b"tenant %s\n%s" % (self.tenant.encode(), own) if self.is_known else own

    @property
    def owner(self) -> str | None:
        """Whose requests it may end; None: anybody's."""
        return self.tenant if self.is_known else None


class Callers:
    """``keys``: None lets everybody in."""

    def __init__(self, keys: ApiKeys | None, clock: Clock) -> None:
        self._keys = keys
        self._clock = clock
        self._tenants = Tenants()
        self._refusals = Refusals()

    @property
    def need_keys(self) -> bool:
        return self._keys is not None

    def caller(self, authorization: str | None) -> Caller:
        """Raises UnauthenticatedError where a key is needed and this is none."""
        if self._keys is None:
            tenant = self._tenants.tenant_of(authorization)
            return Caller(tenant=tenant, is_known=False, is_operator=True)
        given = bearer_key(authorization)
        if given is None:
            raise UnauthenticatedError(
                "an API key is needed: send it as the header `Authorization: Bearer KEY`"
            )
        if (key := self._keys.find(given)) is None:
            raise UnauthenticatedError("the API key is not one of this server's")
        return Caller(tenant=key.tenant, is_known=True, is_operator=key.is_operator)

    def refused(self, peer: str, error: UnauthenticatedError | PermissionDeniedError) -> None:
        """Note it in the log, which nobody can flood."""
        if line := self._refusals.note(f"call from {peer} refused: {error}", self._clock.now_s()):
            logger.warning("%s", line)
