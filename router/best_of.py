"""``best_of``: more answers are made than are given; the likeliest are given.

An answer's worth is the mean of its tokens' log-probabilities, those of the raw logits, as OpenAI
and vLLM had it. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.request import TokenLogprobs

Logprobs = tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOf:
    """How many answers of those to one prompt are given, and whether their log-probabilities,
    which choosing needs, are for the client too.
    """

    num_given: int
    show_logprobs: bool

    def choose(self, answers: Sequence[Logprobs]) -> list[int]:
        """The positions of the best answers, best first; of equal ones the earlier."""
        order = sorted(range(len(answers)), key=lambda i: -_mean(answers[i]))
        return order[: self.num_given]


def _mean(logprobs: Logprobs) -> float:
    if not logprobs:
        return float("-inf")  # it was ended before its first token
    return sum(item.logprob for item in logprobs) / len(logprobs)
