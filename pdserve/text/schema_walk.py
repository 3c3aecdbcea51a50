"""The schemas within a JSON schema: which of its values are schemas, and which are names or data.

properties, $defs, ...     names, whatever they are, with a schema each
enum, const, default, ...  data: nothing in them is a schema
all others                 schemas where they are objects, or lists of such
"""

from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = frozenset(
    {
        "$defs",
        "definitions",
        "dependencies",
        "dependentSchemas",
        "patternProperties",
        "properties",
    }
)
_DATA = frozenset({"const", "default", "enum", "example", "examples"})


def schemas_in(schema: object) -> Iterator[dict[str, Any]]:
    """The schema itself and all within it, each once; those that are true or false are left out."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            yield each
            for key, value in each.items():
                if key in _NAMED and isinstance(value, Mapping):
                    left += value.values()
                elif key not in _DATA:
                    left.append(value)
