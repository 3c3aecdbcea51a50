"""Slips of the pen in the keys of objects inside a body: ``paramters`` of a tool, ``contents`` of a
message.

Clients send whole messages back as they came, with keys of many servers, so an unknown key is let
through here, unlike in the body itself (``unknown_fields.py``). One that is near a known key of its
object is refused by its path, since an answer that ignores it in silence is not the one that was
asked for. Pure; which keys an object has is said where the object is read.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from router.unknown_fields import nearest, unknown

# Keys that servers put into what clients send back to them, and that only look like ours.
ECHOED_OF_MESSAGES = (
    *("agent", "caller", "content_blocks", "content_parts", "content_type", "context"),
    *("function_call", "invalid_tool_calls", "namespace", "outputs", "parsed_arguments"),
    *("thinking_content", "tool_call_chunks", "tool_call_id", "tool_name", "tool_plan"),
    *("tool_results", "tools", "username"),
)
ECHOED_OF_PARTS = ("context", "extra", "extras", "mime_type")
MAX_NAMES = 128  # different unknown keys of a field that are compared; no client has so many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keys:
    """The keys of an object, or of each object of a list."""

    known: Collection[str]
    let_through: Collection[str] = ()  # keys of others that only look like a known one
    inside: Mapping[str, "Keys"] = field(default_factory=dict)  # key -> keys of what it holds


def check_keys(where: str, keys: Keys, value: object) -> object:
    """``value`` as it came, which may be anything. Raises InvalidRequestError for the first key
    that is not known and near a known one; null asks for nothing.
    """
    _check(where, keys, value, set())
    return value


def _check(where: str, keys: Keys, value: object, strange: set[tuple[Keys, str]]) -> None:
    """``strange``: the unknown keys that were seen so far, and are near none."""
    for place, item in _objects(where, value):
        for name, held in item.items():
            if name in keys.inside:
                _check(f"{place}.{name}", keys.inside[name], held, strange)
            elif held is not None and name not in keys.known and name not in keys.let_through:
                if (keys, name) in strange or len(strange) >= MAX_NAMES:
                    continue
                if near := nearest(name, keys.known):
                    raise unknown(place, name, near)
                strange.add((keys, name))


def _objects(where: str, value: object) -> Iterator[tuple[str, dict[str, object]]]:
    """The object itself, or those of a list, each with its path."""
    if isinstance(value, dict):
        yield where, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, dict):
                yield f"{where}[{i}]", item
