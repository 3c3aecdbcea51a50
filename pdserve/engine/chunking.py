"""How one step's token budget is shared out among prompts: pure arithmetic.

Prompts come in the order in which they should be served. The first takes what it needs, the next
what is left, so short prompts in front finish in one step and a long one behind them fills the
rest.
"""

from collections.abc import Iterable, Iterator

from pdserve.engine.sequence import Sequence


def share_budget(sequences: Iterable[Sequence], budget: int) -> Iterator[tuple[Sequence, int]]:
    """Yield (sequence, chunk length) until ``budget`` tokens are spent; each length is >= 1."""
    for sequence in sequences:
        if budget <= 0:
            return
        length = min(sequence.num_unplanned_prompt, budget)
        if length > 0:
            budget -= length
            yield sequence, length
