"""Log-probabilities of sampled tokens: those of the raw logits, before any change."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.request import TokenLogprobs
from pdserve.engine.staging import HostCopy, on_device


class RowLogprobs:
    """The log-probabilities of some rows of a step, on their way to the host."""

    def __init__(self, logits: Tensor, tokens: Tensor, wanted: dict[int, int]) -> None:
        """``wanted``: rows of ``logits`` ``[R, V]``, and how many likeliest tokens each shows."""
        index = on_device(list(wanted), torch.int64, logits.device)
        chosen = logits.index_select(0, index).float()
        total = chosen.logsumexp(1, keepdim=True)
        self._tops = {row: (i, num_top) for i, (row, num_top) in enumerate(wanted.items())}
        sampled = chosen.gather(1, tokens[index, None]) - total
        best = chosen.topk(min(max(wanted.values()), chosen.shape[1]), dim=1)
        self._copy = HostCopy(logits.device, sampled, best.values - total, best.indices)
        self._on_host: tuple[list[list[float]], list[list[float]], list[list[int]]] | None = None

    def of(self, row: int) -> TokenLogprobs | None:
        """A row's log-probabilities, None where it wanted none; best first, then by token id."""
        if row not in self._tops:
            return None
        if self._on_host is None:
            sampled_there, best_there, ids_there = self._copy.wait()
            self._on_host = (sampled_there.tolist(), best_there.tolist(), ids_there.tolist())
        sampled, best, best_ids = self._on_host
        i, num_top = self._tops[row]
        pairs = zip(best_ids[i], best[i], strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(logprob=sampled[i][0], top=tuple(top[:num_top]))


def wanted_logprobs(counts: Sequence[int | None]) -> dict[int, int]:
    """The rows that asked for log-probabilities, with how many."""
    return {row: count for row, count in enumerate(counts) if count is not None}
