"""The binary form of plain data, derived from the type hints of its classes.

    int → 8 bytes signed   float → 8 bytes   bool → 1 byte   str → length, UTF-8
    bytes → length, bytes
    tuple[int, ...] → length, 8 bytes each     tuple[X, ...] → length, each X
    tuple[X, Y], NamedTuple, dataclass → the fields in their order     X | None → 1 byte, X if 1

Little-endian, unaligned, no names, no tags: both ends must run the same code (``wire.py`` checks it
by ``signature``). Decoding reads inside its record only and raises ValueError or struct.error on
whatever does not fit; it trusts no length before it has seen that the bytes are there.
"""

import struct
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, NewType, Union, get_args, get_origin, get_type_hints

INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")


class Cursor:
    """Where decoding stands in one record."""

    __slots__ = ("offset", "record")

    def __init__(self, record: bytes, offset: int = 0) -> None:
        self.record = record
        self.offset = offset

    def number(self) -> int:
        (value,) = INT.unpack_from(self.record, self.offset)
        self.offset += 8
        return int(value)

    def ints(self, count: int) -> tuple[int, ...]:
        """The next ``count`` integers."""
        values: tuple[int, ...] = struct.unpack_from(
            f"<{self._fits(count, 8)}q", self.record, self.offset
        )
        self.offset += 8 * count
        return values

    def floats(self, count: int) -> tuple[float, ...]:
        """The next ``count`` floats."""
        values: tuple[float, ...] = struct.unpack_from(
            f"<{self._fits(count, 8)}d", self.record, self.offset
        )
        self.offset += 8 * count
        return values

    def raw(self, count: int) -> bytes:
        start = self.offset
        self.offset += self._fits(count, 1)
        return self.record[start : self.offset]

    def length(self) -> int:
        """The next integer as a count of things that take at least a byte each."""
        return self._fits(self.number(), 1)

    def end(self) -> None:
        if self.offset != len(self.record):
            raise ValueError(f"{len(self.record) - self.offset} bytes too many")

    def _fits(self, count: int, size: int) -> int:
        left = len(self.record) - self.offset
        if not 0 <= count * size <= left:
            raise ValueError(f"{count} × {size} bytes announced, {left} are there")
        return count


class Codec(NamedTuple):
    """How one type is written and read. ``signature`` differs where the binary form does."""

    encode: Callable[[Any, bytearray], None]
    decode: Callable[[Cursor], Any]
    signature: str


def pack_ints(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def pack_floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@cache
def codec_of(hint: Any) -> Codec:  # noqa: ANN401 - a type hint has no narrower type
    """The codec of a type hint. Raises TypeError for a type that has no binary form."""
    if isinstance(hint, NewType):
        return codec_of(hint.__supertype__)
    if hint in _ATOMS:
        return _ATOMS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        element = codec_of(arguments[0])
        return _ints_codec() if element is _ATOMS[int] else _sequence_codec(element)
    if origin is tuple:
        return _fields_codec(tuple, tuple(codec_of(argument) for argument in arguments), "tuple")
    if origin in (Union, types.UnionType) and arguments[1:] == (type(None),):
        return _optional_codec(codec_of(arguments[0]))
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_codec(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_make"):
        hints = get_type_hints(hint)
        codecs = tuple(codec_of(hints[name]) for name in hints)
        return _fields_codec(hint._make, codecs, hint.__name__)
    raise TypeError(f"{hint!r} has no binary form")


def _dataclass_codec(kind: type) -> Codec:
    hints = get_type_hints(kind)
    names = tuple(field.name for field in fields(kind))
    codecs = tuple(codec_of(hints[name]) for name in names)
    encoders = tuple(zip(names, (codec.encode for codec in codecs), strict=True))
    decoders = tuple(zip(names, (codec.decode for codec in codecs), strict=True))

    def encode(value: Any, out: bytearray) -> None:  # noqa: ANN401
        for name, encode_field in encoders:
            encode_field(getattr(value, name), out)

    def decode(cursor: Cursor) -> Any:  # noqa: ANN401
        return kind(**{name: decode_field(cursor) for name, decode_field in decoders})

    inside = ",".join(f"{n}:{c.signature}" for n, c in zip(names, codecs, strict=True))
    return Codec(encode, decode, f"{kind.__name__}({inside})")


def _fields_codec(make: Callable[[list[Any]], Any], codecs: tuple[Codec, ...], name: str) -> Codec:
    def encode(value: tuple[Any, ...], out: bytearray) -> None:
        for codec, field in zip(codecs, value, strict=True):
            codec.encode(field, out)

    def decode(cursor: Cursor) -> Any:  # noqa: ANN401
        return make([codec.decode(cursor) for codec in codecs])

    return Codec(encode, decode, f"{name}({','.join(codec.signature for codec in codecs)})")


def _sequence_codec(element: Codec) -> Codec:
    def encode(values: tuple[Any, ...], out: bytearray) -> None:
        out += INT.pack(len(values))
        for value in values:
            element.encode(value, out)

    def decode(cursor: Cursor) -> tuple[Any, ...]:
        return tuple([element.decode(cursor) for _ in range(cursor.length())])

    return Codec(encode, decode, f"[{element.signature}]")


def _ints_codec() -> Codec:
    def encode(values: tuple[int, ...], out: bytearray) -> None:
        out += INT.pack(len(values))
        out += pack_ints(values)

    return Codec(encode, lambda cursor: cursor.ints(cursor.length()), "[q]")


def _optional_codec(inner: Codec) -> Codec:
    def encode(value: Any, out: bytearray) -> None:  # noqa: ANN401
        _encode_bool(value is not None, out)
        if value is not None:
            inner.encode(value, out)

    def decode(cursor: Cursor) -> Any:  # noqa: ANN401
        return inner.decode(cursor) if _decode_bool(cursor) else None

    return Codec(encode, decode, f"{inner.signature}?")


def _encode_bool(value: bool, out: bytearray) -> None:
    out.append(1 if value else 0)


def _decode_bool(cursor: Cursor) -> bool:
    (byte,) = cursor.raw(1)
    if byte > 1:
        raise ValueError(f"{byte} is no truth value")
    return byte == 1


def _encode_str(value: str, out: bytearray) -> None:
    data = value.encode(errors="backslashreplace")  # a file name in an error may hold surrogates
    out += INT.pack(len(data))
    out += data


def _encode_bytes(value: bytes, out: bytearray) -> None:
    out += INT.pack(len(value))
    out += value


_ATOMS: dict[Any, Codec] = {
    int: Codec(lambda value, out: out.extend(INT.pack(value)), Cursor.number, "q"),
    float: Codec(
        lambda value, out: out.extend(FLOAT.pack(value)), lambda cursor: cursor.floats(1)[0], "d"
    ),
    bool: Codec(_encode_bool, _decode_bool, "?"),
    bytes: Codec(_encode_bytes, lambda cursor: cursor.raw(cursor.length()), "b"),
    str: Codec(_encode_str, lambda cursor: cursor.raw(cursor.length()).decode(), "s"),
}
