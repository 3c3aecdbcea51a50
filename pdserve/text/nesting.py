"""How deep JSON values may be nested, looked at without recursion, so that whatever comes after may
recurse.
"""

from collections.abc import Iterable, Mapping

from pdserve.core.errors import InvalidRequestError

# Lists and objects in one another. The grammar library takes 123; Python's own, in which templates
# and tools are written as JSON, about 900.
MAX_DEPTH = 120
TOO_DEEP = "it is nested too deeply"


def check_depth(field: str, value: object) -> None:
    """Raise InvalidRequestError naming the field where parsed JSON is nested deeper."""
    level = _containers([value])
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = _containers(
            item
            for container in level
            for item in (container.values() if isinstance(container, Mapping) else container)
        )
    if level:
        problem = f"{TOO_DEEP}, at most {MAX_DEPTH} lists and objects in one another are allowed"
        raise InvalidRequestError(field, problem)


def _containers(values: Iterable[object]) -> list[Mapping[object, object] | list[object]]:
    return [value for value in values if isinstance(value, Mapping | list)]
