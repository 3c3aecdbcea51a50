"""Whole numbers of JSON schemas that an answer could not keep to.

The grammar library holds numbers as floats: of 2**53 + 1 it makes 2**53, which is another number to
the program behind the answer.
"""

from collections.abc import Iterator
from typing import Any

from pdserve.text.schema_walk import schemas_in

MOST = 1 << 53
_VALUES = ("const", "enum")
_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")


def check_numbers(schema: Any) -> None:  # noqa: ANN401 - a schema may be any JSON value
    """Raise ValueError for a whole number beyond 2**53 that binds an answer."""
    for each in schemas_in(schema):
        for key in _BOUNDS:
            _check(key, each.get(key))
        for key in _VALUES:
            for value in _all_in(each.get(key)):
                _check(key, value)


def _all_in(data: Any) -> Iterator[Any]:  # noqa: ANN401
    """A value that an answer may have, with all within it."""
    left = [data]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each


def _check(key: str, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError(f"{key}: {value} cannot be kept to, whole numbers can up to 2**53")
