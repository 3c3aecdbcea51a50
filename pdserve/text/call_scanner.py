"""One tool call's JSON object, read as it comes: its name, and its arguments as they stand there.

{"name": "f", "arguments": {…}}    the keys in any order, others between them
"""

import json
from enum import Enum, auto

ARGUMENTS_KEYS = ("arguments", "parameters")
_NAME = "name"


class _In(Enum):
    """Where in the outer object the scanner is."""

    BEFORE = auto()
    KEYS = auto()
    VALUE = auto()
    AFTER = auto()


class CallScanner:
    """Feed it text from the ``{`` on. Only who is among ``names`` can be called."""

    def __init__(self, names: frozenset[str]) -> None:
        self.name = ""
        self._names = names
        self._raw: list[str] = []
        self._place = _In.BEFORE
        self._depth = 0  # inside a value
        self._in_string = self._escaped = False
        self._token = ""  # the key or value that is being read
        self._key: str | None = None
        self._arguments = ""  # not taken yet
        self._has_arguments = False

    @property
    def has_begun(self) -> bool:
        """It is known who is called, and how its arguments begin."""
        return self.name in self._names and self._has_arguments

    @property
    def is_over(self) -> bool:
        return self._place is _In.AFTER

    @property
    def raw(self) -> str:
        """All that it took."""
        return "".join(self._raw)

    def push(self, text: str) -> str:
        """Take text in up to the object's end; returns the rest."""
        for i, char in enumerate(text):
            if self.is_over:
                return text[i:]
            self._raw.append(char)
            self._take(char)
        return ""

    def take_arguments(self) -> str:
        """What came of the arguments, once it is known whose they are."""
        if not self.has_begun:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _take(self, char: str) -> None:
        match self._place:
            case _In.BEFORE:
                self._place = _In.KEYS  # the "{" itself
            case _In.KEYS:
                self._in_keys(char)
            case _In.VALUE:
                self._in_value(char)

    def _in_keys(self, char: str) -> None:
        if self._in_string or char == '"':
            self._token += char
            self._follow_string(char)
        elif char == ":":
            self._key, self._token = _text(self._token), ""
            self._place = _In.VALUE
        elif char == "}":
            self._end()

    def _in_value(self, char: str) -> None:
        is_end = not self._in_string and self._depth == 0 and char in ",}"
        if is_end:
            self._token, self._key = "", None
            self._place = _In.KEYS
            if char == "}":
                self._end()
            return
        if self._in_string or char == '"':
            self._follow_string(char)
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._key in ARGUMENTS_KEYS:
            is_space = not self._in_string and self._depth == 0 and char.isspace()
            if not is_space:
                self._has_arguments = True
                self._arguments += char
        else:
            self._token += char
            if self._key == _NAME and self._depth == 0 and not self._in_string:
                self.name = _text(self._token) or self.name

    def _end(self) -> None:
        self._place = _In.AFTER
        if not self._has_arguments:  # it takes none, and the model left them out
            self._has_arguments, self._arguments = True, "{}"

    def _follow_string(self, char: str) -> None:
        if not self._in_string:
            self._in_string = True
        elif self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


def _text(token: str) -> str:
    """A JSON string's text; "" where it is none."""
    try:
        value = json.loads(token)
    except (ValueError, RecursionError):  # RecursionError: brackets in brackets
        return ""
    return value if isinstance(value, str) else ""
