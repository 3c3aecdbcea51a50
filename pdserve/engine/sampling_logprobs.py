"""Log-probabilities of sampled tokens: those of the raw logits, before any change."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.request import TokenLogprobs


class RowLogprobs:
    """The log-probabilities of some rows of a step; on the device until one is asked for."""

    def __init__(self, logits: Tensor, tokens: Tensor, wanted: dict[int, int]) -> None:
        """``wanted``: rows of ``logits`` ``[R, V]``, and how many likeliest tokens each shows."""
        index = torch.tensor(list(wanted), dtype=torch.int64).to(logits.device)
        chosen = logits.index_select(0, index).float()
        total = chosen.logsumexp(1, keepdim=True)
        self._tops = {row: (i, num_top) for i, (row, num_top) in enumerate(wanted.items())}
        self._sampled = chosen.gather(1, tokens[index, None]) - total
        best = chosen.topk(min(max(wanted.values()), chosen.shape[1]), dim=1)
        self._best = best.values - total
        self._best_ids = best.indices
        self._on_host: tuple[list[list[float]], list[list[float]], list[list[int]]] | None = None

    def of(self, row: int) -> TokenLogprobs | None:
        """A row's log-probabilities, None where it wanted none; best first, then by token id."""
        if row not in self._tops:
            return None
        if self._on_host is None:
            # sync: the caller wants the values now
            self._on_host = (self._sampled.tolist(), self._best.tolist(), self._best_ids.tolist())
        sampled, best, best_ids = self._on_host
        i, num_top = self._tops[row]
        pairs = zip(best_ids[i], best[i], strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(logprob=sampled[i][0], top=tuple(top[:num_top]))


def wanted_logprobs(counts: Sequence[int | None]) -> dict[int, int]:
    """The rows that asked for log-probabilities, with how many."""
    return {row: count for row, count in enumerate(counts) if count is not None}
