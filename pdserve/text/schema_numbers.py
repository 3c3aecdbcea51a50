"""Whole numbers of JSON schemas that an answer could not keep to.

The grammar library holds numbers as floats: of 2**53 + 1 it makes 2**53, which is another number to
the program behind the answer.
"""

from collections.abc import Mapping
from typing import Any

MOST = 1 << 53
_VALUES = frozenset({"const", "enum"})
_BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"})
_REMARKS = frozenset({"default", "example", "examples"})  # they bind no answer


def check_numbers(schema: Any) -> None:  # noqa: ANN401 - a schema may be any JSON value
    """Raise ValueError for the first whole number beyond 2**53 that binds an answer.

    Raises RecursionError where the schema is nested too deeply.
    """
    if isinstance(schema, list):
        for item in schema:
            check_numbers(item)
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _VALUES:
            _check_all(key, value)
        elif key in _BOUNDS:
            _check(key, value)
        if key not in _VALUES | _REMARKS:
            check_numbers(value)


def _check_all(key: str, data: Any) -> None:  # noqa: ANN401
    """All numbers in a value that an answer may have."""
    items = data.values() if isinstance(data, Mapping) else data
    if isinstance(data, Mapping | list):
        for item in items:
            _check_all(key, item)
    else:
        _check(key, data)


def _check(key: str, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError(f"{key}: {value} cannot be kept to, whole numbers can up to 2**53")
