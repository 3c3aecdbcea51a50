"""What a sequence's next token may be, as schedulers and ranks see it.

A constraint belongs to one sequence and goes from one of its lives to the next. Who works its masks
out is ``grammars.py``'s business, and on a prefill node nobody's: there the one mask comes with the
task.
"""

from dataclasses import dataclass
from typing import Protocol


class Constraint(Protocol):
    """Where a sequence stands in its grammar."""

    @property
    def mask(self) -> bytes | None:
        """A bit for each token that may come next, the lowest bit of a byte first.

        None while that is being worked out.
        """

    def advance(self, token_id: int) -> bool:
        """Take in the next token; True if the answer is complete with it."""

    def copy(self) -> "Constraint":
        """Another one that stands where this one does; only while ``mask`` is known."""


@dataclass(frozen=True, slots=True)
class FirstTokenMask:
    """The constraint of a sequence of which only the first tokens are sampled here."""

    mask: bytes

    def advance(self, token_id: int) -> bool:
        return False

    def copy(self) -> "FirstTokenMask":
        return self
