"""How deep JSON values may be nested, looked at without recursion, so that whatever comes after may
recurse.
"""

from typing import TypeAlias

from pdserve.core.errors import InvalidRequestError

# Lists and objects in one another. The grammar library takes 123; Python's own, in which templates
# and tools are written as JSON, about 900.
MAX_DEPTH = 120
TOO_DEEP = "it is nested too deeply"
_CONTAINERS = frozenset({dict, list})  # what JSON is parsed to

Container: TypeAlias = "dict[str, object] | list[object]"


def check_depth(field: str, value: object) -> None:
    """Raise InvalidRequestError naming the field where parsed JSON is nested deeper."""
    level = _containers_in([value])
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [inner for container in level for inner in _containers_in(container)]
    if level:
        problem = f"{TOO_DEEP}, at most {MAX_DEPTH} lists and objects in one another are allowed"
        raise InvalidRequestError(field, problem)


def _containers_in(container: Container) -> list[Container]:
    values = container.values() if isinstance(container, dict) else container
    if _CONTAINERS.isdisjoint(map(type, values)):  # quick: most lists have none
        return []
    return [value for value in values if isinstance(value, (dict, list))]
