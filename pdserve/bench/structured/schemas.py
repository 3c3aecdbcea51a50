"""JSON schemas to ask for: drawn, small, and such that every answer has an end.

Strings, arrays and numbers are bounded, so that a small model that rambles still completes them.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    *("name", "title", "city", "colour", "status", "count", "price", "tags", "owner", "level"),
    *("country", "note", "code", "size", "kind", "speed", "year", "team", "unit", "place"),
)
_DEPTH = 2


def make_schema(draw: random.Random) -> Schema:
    """The schema of an object."""
    return _object(draw, _DEPTH)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    properties = {name: _value(draw, depth - 1) for name in names}
    required = [name for name in names if draw.random() < 0.8]  # noqa: PLR2004
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> Schema:
    kinds = list(_LEAVES.values())
    if depth > 0:
        kinds += [lambda draw: _object(draw, depth), lambda draw: _array(draw, depth)]
    return draw.choice(kinds)(draw)


def _array(draw: random.Random, depth: int) -> Schema:
    most = draw.randint(1, 3)
    least = draw.randint(0, most)
    items = _value(draw, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _string(draw: random.Random) -> Schema:
    return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 16)}


def _integer(draw: random.Random) -> Schema:
    least = draw.randint(-100, 100)
    return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 1000)}


def _enum(draw: random.Random) -> Schema:
    return {"enum": draw.sample(_WORDS, draw.randint(1, 5))}


def _pattern(draw: random.Random) -> Schema:
    letters = draw.randint(1, 3)
    return {"type": "string", "pattern": f"^[A-Z]{{{letters}}}-[0-9]{{1,4}}$"}


def _any_of(draw: random.Random) -> Schema:
    return {"anyOf": [_string(draw), {"type": "null"}]}


_LEAVES: Mapping[str, Callable[[random.Random], Schema]] = {
    "string": _string,
    "integer": _integer,
    "enum": _enum,
    "pattern": _pattern,
    "boolean": lambda draw: {"type": "boolean"},
    "date": lambda draw: {"type": "string", "format": "date"},
    "anyOf": _any_of,
}
