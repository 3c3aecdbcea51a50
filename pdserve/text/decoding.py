"""From tokens to text, piece by piece: ``tokenizer.json``'s decoder section as a chain of stages.

A stage turns pieces of text into pieces of text, holds back what later pieces may change, and gives
it up at the end. All that a chain puts out, joined, is what the ``tokenizers`` library decodes from
the same tokens at once. A chain also knows the bytes that a token stands for on its own.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

_BYTE_PIECE = re.compile(r"<0x([0-9a-fA-F]{2})>")
_REPLACEMENT = "\ufffd"


class Stage(Protocol):
    """One step of decoding, with what it holds back as its state."""

    def push(self, pieces: Iterable[str]) -> list[str]: ...

    def flush(self) -> list[str]: ...

    def as_bytes(self, piece: bytes) -> bytes:
        """What a piece stands for alone, whatever its neighbours are. Does not touch the state."""


class DecodingChain:
    """The stages of one stream of tokens."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def push(self, pieces: Sequence[str]) -> str:
        """The text that is certain now that ``pieces``, the next tokens, are known."""
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, as no token follows that could change it."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.flush()
        return "".join(pieces)

    def as_bytes(self, piece: str) -> bytes:
        """The bytes of one token, spaces at its ends included."""
        value = piece.encode()
        for stage in self._stages:
            value = stage.as_bytes(value)
        return value


def make_chain(decoder: dict[str, Any] | None) -> DecodingChain:
    """A fresh chain for the decoder section of a ``tokenizer.json``.

    Raises ValueError naming a decoder that is not known here, KeyError for one with a part missing.
    """
    if decoder is None:
        return DecodingChain([_Spaced()])
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    fused = False  # from here on all tokens are one string
    for step in steps:
        if step["type"] != "Fuse":
            stages.append(_make_stage(step, fused=fused))
        fused = fused or step["type"] in ("Fuse", "ByteLevel")
    return DecodingChain(stages)


def _make_stage(step: dict[str, Any], *, fused: bool) -> Stage:
    match step:
        case {"type": "ByteLevel"}:
            return _ByteLevel()
        case {"type": "ByteFallback"}:
            return _ByteFallback()
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
            not fused or len(old) == 1  # a longer one could span two pieces
        ):
            return _Replace(old, new)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return _Metaspace(mark, strips_first=step.get("prepend_scheme", "always") != "never")
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return _StripStart(char, start, once=fused)
    raise ValueError(f"decoder {step['type']} ({step}) is not known")


class _ByteLevel:
    """Each character of a token stands for a byte; what has other characters stands for itself."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False  # a character has begun

    def push(self, pieces: Iterable[str]) -> list[str]:
        data = b"".join(map(_byte_level_bytes, pieces))
        if not self._is_open and data.isascii():  # most text; much cheaper than the decoder
            text = data.decode("ascii")
        else:
            text = self._utf8.decode(data)
            self._is_open = bool(self._utf8.getstate()[0])
        return [text] if text else []

    def flush(self) -> list[str]:
        text = self._utf8.decode(b"", final=True)
        self._is_open = False
        return [text] if text else []

    def as_bytes(self, piece: bytes) -> bytes:
        return _byte_level_bytes(piece.decode())


class _ByteFallback:
    """A run of tokens ``<0xNN>`` is text if all of it is UTF-8, otherwise a U+FFFD for each byte.

    So nothing of a run is certain before its end.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, pieces: Iterable[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            if match := _BYTE_PIECE.fullmatch(piece):
                self._run.append(int(match[1], 16))
            else:
                out += self.flush()
                out.append(piece)
        return out

    def flush(self) -> list[str]:
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)

    def as_bytes(self, piece: bytes) -> bytes:
        match = _BYTE_PIECE.fullmatch(piece.decode(errors="replace"))
        return bytes([int(match[1], 16)]) if match else piece


class _Replace:
    """Another string in place of one, inside each piece."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def push(self, pieces: Iterable[str]) -> list[str]:
        return [piece.replace(self._old, self._new) for piece in pieces]

    def flush(self) -> list[str]:
        return []

    def as_bytes(self, piece: bytes) -> bytes:
        return piece.replace(self._old.encode(), self._new.encode())


class _Metaspace:
    """A mark stands for a space; in the very first token it was put there by the tokenizer."""

    def __init__(self, mark: str, *, strips_first: bool) -> None:
        self._mark = mark
        self._strips_next = strips_first

    def push(self, pieces: Iterable[str]) -> list[str]:
        out = []
        for piece in pieces:
            out.append(piece.replace(self._mark, "" if self._strips_next else " "))
            self._strips_next = False
        return out

    def flush(self) -> list[str]:
        return []

    def as_bytes(self, piece: bytes) -> bytes:
        return piece.replace(self._mark.encode(), b" ")


class _StripStart:
    """Up to ``count`` leading characters go: once from the whole text, or from each piece."""

    def __init__(self, char: str, count: int, *, once: bool) -> None:
        self._char, self._count, self._once = char, count, once
        self._left = count

    def push(self, pieces: Iterable[str]) -> list[str]:
        return [self._strip(piece) for piece in pieces]

    def flush(self) -> list[str]:
        return []

    def as_bytes(self, piece: bytes) -> bytes:
        return piece

    def _strip(self, piece: str) -> str:
        if not self._once:
            self._left = self._count
        start = 0
        while self._left and piece[start : start + 1] == self._char:
            start, self._left = start + 1, self._left - 1
        if start < len(piece):
            self._left = 0  # something else came: the rest of the text stays as it is
        return piece[start:]


class _Spaced:
    """No decoder: the tokens with spaces between them."""

    def __init__(self) -> None:
        self._has_begun = False

    def push(self, pieces: Iterable[str]) -> list[str]:
        out = []
        for piece in pieces:
            out.append(f" {piece}" if self._has_begun else piece)
            self._has_begun = True
        return out

    def flush(self) -> list[str]:
        return []

    def as_bytes(self, piece: bytes) -> bytes:
        return piece


def _byte_level_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the other bytes, in order, got the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_LEVEL = _byte_level_characters()


@lru_cache(maxsize=1 << 18)  # at most a vocabulary
def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[char] for char in piece])
    except KeyError:
        return piece.encode()
