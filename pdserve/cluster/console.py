"""What a command writes to its terminal: one line per stage, answers as they come.

A terminal may go away, or who reads a pipe. What is served is served on, or ended in order.
"""

import os
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
        try:
            self.out.write(text)
            self.out.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Nobody reads it any more: write to nowhere, now and at the end of the process."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.out.fileno())
        os.close(nowhere)
