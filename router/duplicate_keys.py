"""Whether an object of a JSON text names a key twice: what is meant then nobody can tell.

The parser takes the last and says nothing. A text with as many colons as keys names none twice,
which a look at its bytes tells; others, with colons in their texts, are read once more. That takes
three milliseconds for a megabyte, and texts that are longer are let go.
"""

import json

from pdserve.core.errors import InvalidRequestError
from pdserve.text.nesting import TOO_DEEP
from router.validation import shown

Pairs = list[tuple[str, object]]

MAX_READ_TWICE = 1 << 20  # bytes
MAX_SHOWN_NAME = 60


def check_unique(raw: bytes, num_keys: int) -> None:
    """Raise InvalidRequestError naming a key that comes twice in ``raw``, which is JSON that
    parsed into objects with ``num_keys`` keys in all.
    """
    if len(raw) <= MAX_READ_TWICE and raw.count(b":") != num_keys:
        json.loads(raw, object_pairs_hook=_unique, parse_int=str, parse_float=str)


def parse_unique(field: str, text: str, max_bytes: int) -> object:
    """The value of ``field``, which is a JSON text. Raises InvalidRequestError naming the field
    where it is none, where a key comes twice, and, before a look at it, where it is longer.
    """
    if (size := len(text.encode(errors="surrogatepass"))) > max_bytes:
        raise InvalidRequestError(field, f"got {size} bytes, at most {max_bytes} are allowed")

    def unique(pairs: Pairs) -> dict[str, object]:
        if (key := _first_repeated(pairs)) is not None:
            raise InvalidRequestError(field, f"{shown(key)} is given twice in one object")
        return dict(pairs)

    try:
        value: object = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        raise InvalidRequestError(field, f"it is no JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError(field, TOO_DEEP) from None
    return value


def _unique(pairs: Pairs) -> None:
    """In place of the object itself, which was parsed before."""
    if (key := _first_repeated(pairs)) is not None:
        name = key[:MAX_SHOWN_NAME]
        readable = name.strip() and name.isprintable()
        field = name if readable else json.dumps(name)
        raise InvalidRequestError(field, "it is given twice in one object")


def _first_repeated(pairs: Pairs) -> str | None:
    if len({key for key, _ in pairs}) == len(pairs):
        return None
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return None
