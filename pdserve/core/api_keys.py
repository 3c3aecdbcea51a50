"""API keys as they are kept: never themselves, only the SHA-256 of each, with whose it is.

    # NAME   HASH                    what more it may do
    alice    sha256:9f86d0…
    grafana  sha256:60303a…          operator

One line a key; several keys may have one name, so that a key can be replaced while both are good.
A hash without salt or stretching is enough for what ``new_key`` makes, 256 random bits: there is
nothing to guess. Knows no file and no protocol.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.core.errors import ConfigError

PREFIX = "sk-pdserve-"
KEY_BYTES = 32
LEAST_KEY_CHARS = 32  # of a key that somebody brings
ALGORITHM = "sha256"
OPERATOR = "operator"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key. ``tenant``: whose it is. An operator's also reads metrics and status."""

    tenant: str
    digest: bytes
    is_operator: bool = False


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hashed(key: str, *, tenant: str, is_operator: bool = False) -> ApiKey:
    """How a key is kept. Raises ConfigError for a name that is none, or a key that is short."""
    if not _NAME.fullmatch(tenant):
        raise ConfigError(
            f"name of a key: got {tenant[:64]!r}, allowed are 1 to 64 letters, digits, '.', '_', "
            "'@' and '-'"
        )
    if len(key) < LEAST_KEY_CHARS:
        raise ConfigError(
            f"key of {tenant}: it has {len(key)} characters, at least {LEAST_KEY_CHARS} are "
            "needed; `pdserve keys add` makes one"
        )
    return ApiKey(tenant=tenant, digest=_digest(key), is_operator=is_operator)


def find_key(keys: Iterable[ApiKey], given: str) -> ApiKey | None:
    """The one that ``given`` is; the time it takes does not tell how near a wrong one came."""
    digest, found = _digest(given), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def line_of(key: ApiKey) -> str:
    """The key as a line of a file."""
    line = f"{key.tenant} {ALGORITHM}:{key.digest.hex()}"
    return f"{line} {OPERATOR}" if key.is_operator else line


def parse_keys(text: str, where: str) -> tuple[ApiKey, ...]:
    """The keys of a file, or of a variable with one key in a line or after a comma.

    Raises ConfigError naming the line, and never what stands there: it may be a key.
    """
    lines = text.replace(",", "\n").splitlines()
    stripped = [(i, line.partition("#")[0].split()) for i, line in enumerate(lines, start=1)]
    return tuple(_parse(words, f"{where}, line {i}") for i, words in stripped if words)


def _parse(words: list[str], where: str) -> ApiKey:
    match words:
        case [name, kept] | [name, kept, "operator"]:
            algorithm, _, digest = kept.partition(":")
            if _NAME.fullmatch(name) and algorithm == ALGORITHM and _DIGEST.fullmatch(digest):
                is_operator = words[2:] == [OPERATOR]
                return ApiKey(tenant=name, digest=bytes.fromhex(digest), is_operator=is_operator)
    raise ConfigError(
        f"{where}: expected NAME {ALGORITHM}:HASH, and perhaps {OPERATOR}, as `pdserve keys add` "
        "prints it; keys themselves are not kept"
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
