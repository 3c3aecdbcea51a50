"""Tool calls out of an answer's text, as it comes: who is called at once, arguments in pieces.

    TEXT --opener, or "{" where calls begin bare--> BETWEEN --"{"--> CALL --its "}"--> BETWEEN
      ^                                                |                                  |
      '------------- closer, or what is no call -------'<---------------------------------'

What looks like a call and is none is text. The result does not depend on how the text is cut.
"""

from dataclasses import dataclass
from enum import Enum, auto

from pdserve.text.call_scanner import CallScanner
from pdserve.text.tools import ToolFormat

_SEPARATORS = frozenset(" \t\r\n[],;")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what the model says beside its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The next call; ``index`` counts them."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON when all of it is there."""

    index: int
    json: str


CallEvent = TextPiece | CallBegun | CallArguments


class _State(Enum):
    TEXT = auto()
    BETWEEN = auto()
    CALL = auto()


class ToolParser:
    """One answer of a model that may call ``names``. ``forced``: it has to be calls, and may leave
    the opener out; ``most``: calls that are wanted, None for all.
    """

    def __init__(
        self, written: ToolFormat, names: frozenset[str], *, forced: bool, most: int | None
    ) -> None:
        self._format = written
        self._names = names
        self._most = most
        self._may_begin_bare = forced or written.begins_bare
        self._state = _State.TEXT
        self._held = ""  # text that may yet turn out to be an opener or closer, or white space
        self._region = ""  # what was read since the region of calls was opened, and is no call
        self._scanner = CallScanner(names)
        self._num_calls = 0
        self._events: list[CallEvent] = []

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[CallEvent]:
        """What the next text makes certain."""
        self._held += text
        while self._advance():
            pass
        return self._take()

    def flush(self) -> list[CallEvent]:
        """The rest, as nothing follows."""
        if self._state is _State.CALL:
            if not self._scanner.has_begun:
                self._say(self._region + self._scanner.raw)
        elif self._state is _State.BETWEEN:
            if not self.has_calls or not self._is_mark_begun():
                self._say(self._region + self._held)
        elif not self.has_calls or self._held.strip():
            self._say(self._held)
        self._held = self._region = ""
        return self._take()

    def _advance(self) -> bool:
        """One step; False where more text is needed."""
        match self._state:
            case _State.TEXT:
                return self._in_text()
            case _State.BETWEEN:
                return self._between()
            case _State.CALL:
                return self._in_call()

    def _in_text(self) -> bool:
        if self._may_begin_bare:
            begin = self._held.lstrip()
            if not begin:
                return False
            if begin[0] in "{[" and not self._format.opener.startswith(begin[:2]):
                self._may_begin_bare = False
                self._open(len(self._held) - len(begin), 0)
                return True
            if begin[0] not in "{[" and not self._format.opener.startswith(begin):
                self._may_begin_bare = False
        place = self._held.find(self._format.opener)
        if place >= 0:
            self._may_begin_bare = False
            self._say(self._held[:place].rstrip())  # what leads to a call is not said
            self._open(place, len(self._format.opener))
            return True
        kept = _num_kept(self._held, self._format.opener)
        self._say(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return False

    def _open(self, place: int, length: int) -> None:
        """The region of calls begins ``length`` characters after ``place``."""
        self._region = self._held[place : place + length]
        self._held = self._held[place + length :]
        self._state = _State.BETWEEN

    def _between(self) -> bool:
        rest = self._held.lstrip("".join(_SEPARATORS))
        self._region += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if not rest:
            return False
        if rest[0] == "{":
            self._state = _State.CALL
            self._scanner = CallScanner(self._names)
            return True
        for mark in (self._format.closer, self._format.opener):
            if mark is not None and mark.startswith(rest[: len(mark)]):
                if len(rest) < len(mark):
                    return False
                self._region += mark
                self._held = rest[len(mark) :]
                if mark == self._format.closer:
                    self._close()
                return True
        self._close()
        return True

    def _is_mark_begun(self) -> bool:
        """What is held is nothing, or the beginning of what stands around calls."""
        marks = (self._format.closer or "", self._format.opener)
        return any(mark.startswith(self._held) for mark in marks)

    def _close(self) -> None:
        """The region is over; without a call in it, it was text."""
        if not self.has_calls:
            self._say(self._region)
        self._region = ""
        self._state = _State.TEXT

    def _in_call(self) -> bool:
        scanner = self._scanner
        begun = scanner.has_begun
        self._held, arguments = scanner.push(self._held), scanner.take_arguments()
        if scanner.has_begun:
            if not begun:
                self._num_calls += 1
                self._put(CallBegun(self._num_calls - 1, scanner.name))
                self._region = ""
            if arguments:
                self._put(CallArguments(self._num_calls - 1, arguments))
        if not scanner.is_over:
            return False
        if not scanner.has_begun:  # an object that is no call
            self._say(self._region + scanner.raw)
            self._region = ""
            self._state = _State.TEXT
        else:
            self._state = _State.BETWEEN
        return bool(self._held)

    def _put(self, event: CallBegun | CallArguments) -> None:
        if self._most is None or event.index < self._most:
            self._events.append(event)

    def _say(self, text: str) -> None:
        if text:
            self._events.append(TextPiece(text))

    def _take(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events


def _num_kept(text: str, mark: str) -> int:
    """Characters at the end that may be the beginning of the mark, and white space before them."""
    kept = next(
        (
            size
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if mark.startswith(text[-size:])
        ),
        0,
    )
    before = text[: len(text) - kept]
    return kept + len(before) - len(before.rstrip())
