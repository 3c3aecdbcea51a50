"""Who a call says it belongs to, for fair sharing: its API key, kept as a keyed hash, never logged.

Not authentication: any key is taken. Calls without a key share one tenant.
"""

import hashlib
import secrets

NO_KEY = "no key"
DIGEST_BYTES = 16


class Tenants:
    """Names of tenants as this process knows them; another process gives other names."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant that an ``Authorization: Bearer KEY`` header, or its absence, names."""
        if (key := bearer_key(authorization)) is None:
            return NO_KEY
        return hashlib.blake2b(
            key.encode(errors="surrogateescape"), key=self._secret, digest_size=DIGEST_BYTES
        ).hexdigest()


def bearer_key(authorization: str | None) -> str | None:
    """The key of an ``Authorization: Bearer KEY`` header."""
    scheme, _, key = (authorization or "").strip().partition(" ")
    key = key.strip()
    return key if scheme.lower() == "bearer" and key else None
