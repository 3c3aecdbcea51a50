"""The log-probabilities of one prompt, as nodes send them in parts.

A leg that starts anew sends them again from the beginning: what is there already is not taken
twice. Pure.
"""

from pdserve.core.errors import InternalError
from pdserve.core.request import PromptLogprob, PromptOutput


class PromptScores:
    """Those of the tokens at positions 1 to ``prompt_len`` - 1: nothing stands before the first."""

    def __init__(self, prompt_len: int) -> None:
        self._num_wanted = prompt_len - 1
        self._logprobs: list[PromptLogprob] = []
        self._told: set[int] = set()  # choices

    def add(self, output: PromptOutput) -> None:
        """Take what goes on where the last part ended; what leaves a gap is of no use."""
        num_had = len(self._logprobs) + 1 - output.index
        if num_had >= 0:
            self._logprobs.extend(output.logprobs[num_had:])

    def first_seen(self, choice: int) -> tuple[PromptLogprob, ...] | None:
        """All of them, with the first tokens of a choice; None with later ones.

        Raises InternalError where some never came: a node left them out.
        """
        if choice in self._told:
            return None
        if len(self._logprobs) != self._num_wanted:
            raise InternalError(
                f"log-probabilities of {len(self._logprobs)} prompt tokens came, not of "
                f"{self._num_wanted}"
            )
        self._told.add(choice)
        return tuple(self._logprobs)
