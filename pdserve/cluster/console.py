"""What a command writes to its terminal: one line per stage, answers as they come."""

from dataclasses import dataclass
from typing import TextIO

_STAGE_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Console:
    """Writes at once, whatever the stream buffers."""

    out: TextIO

    def say(self, stage: str, text: str) -> None:
        """One line about one stage."""
        self.line(f"{stage:<{_STAGE_WIDTH}} {text}")

    def line(self, text: str = "") -> None:
        self.piece(text + "\n")

    def piece(self, text: str) -> None:
        """Part of a line."""
        self.out.write(text)
        self.out.flush()
