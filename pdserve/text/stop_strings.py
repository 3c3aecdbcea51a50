"""Stop strings in a stream of text, whatever the pieces in which it comes.

The match that is complete first wins; of those that end at the same character the longest one. So
the outcome is that of text that comes character by character, however it was cut.
"""

from collections.abc import Sequence


class StopStrings:
    """Passes on the text of one choice up to the first stop string."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be sent now, as it cannot be part of a stop string. Nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched) if self._include else start]
        border = self._first_open_match(text)
        self._held = text[border:]
        return text[:border]

    def flush(self) -> str:
        """What was held back, as no text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = [(text.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _first_open_match(self, text: str) -> int:
        """Where the longest end of ``text`` begins that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stops):
                return start
        return len(text)
