"""Whether an object of a JSON text names a key twice: what is meant then nobody can tell.

The parser takes the last and says nothing. A text with as many colons as keys names none twice,
which a look at its bytes tells; others, with colons in their texts, are read once more. That takes
three milliseconds for a megabyte, and texts that are longer are let go.
"""

import json

from pdserve.core.errors import InvalidRequestError

MAX_READ_TWICE = 1 << 20  # bytes
MAX_SHOWN_NAME = 60


def check_unique(raw: bytes, num_keys: int) -> None:
    """Raise InvalidRequestError naming a key that comes twice in ``raw``, which is JSON that
    parsed into objects with ``num_keys`` keys in all.
    """
    if len(raw) <= MAX_READ_TWICE and raw.count(b":") != num_keys:
        json.loads(raw, object_pairs_hook=_unique, parse_int=str, parse_float=str)


def _unique(pairs: list[tuple[str, object]]) -> None:
    """In place of the object itself, which was parsed before."""
    keys = {key for key, _ in pairs}
    if len(keys) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequestError(key[:MAX_SHOWN_NAME], "it is given twice in one object")
        seen.add(key)
