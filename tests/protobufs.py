"""Messages of any kind with any content, made from their descriptors."""

from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Kind = TypeVar("Kind", bound=Message)

MAX_FIELDS, MAX_ITEMS, MAX_DEPTH = 6, 3, 4

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 100) | st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 100) | st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


def messages(kind: type[Kind], words: tuple[str, ...] = ("x",)) -> st.SearchStrategy[Kind]:
    """Some of the fields set, to anything that the type allows; texts are ``words`` at times."""
    text = st.sampled_from(words) | st.text(max_size=8)

    @st.composite
    def build(draw: st.DrawFn) -> Kind:
        return _filled(draw, kind, text, MAX_DEPTH)

    return build()


def _filled(draw: st.DrawFn, kind: type[Kind], text: st.SearchStrategy[str], depth: int) -> Kind:
    message = kind()
    fields: list[Any] = list(kind.DESCRIPTOR.fields)
    if not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), max_size=MAX_FIELDS, unique=True)):
        if field.message_type is None or depth:
            _set(draw, message, field, text, depth)
    return message


def _set(
    draw: st.DrawFn,
    message: Message,
    field: FieldDescriptor,
    text: st.SearchStrategy[str],
    depth: int,
) -> None:
    place = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        if value.message_type is None:
            place[draw(_scalar(key, text))] = draw(_scalar(value, text))
    elif field.is_repeated:
        for _ in range(draw(st.integers(0, MAX_ITEMS))):
            place.append(_value(draw, field, text, depth))
    elif field.message_type is not None:
        place.CopyFrom(_value(draw, field, text, depth))
    else:
        setattr(message, field.name, _value(draw, field, text, depth))


def _value(
    draw: st.DrawFn, field: FieldDescriptor, text: st.SearchStrategy[str], depth: int
) -> Any:
    if field.message_type is None:
        return draw(_scalar(field, text))
    return _filled(draw, message_factory.GetMessageClass(field.message_type), text, depth - 1)


def _scalar(field: FieldDescriptor, text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=16)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return text
    return _SCALARS[field.cpp_type]
