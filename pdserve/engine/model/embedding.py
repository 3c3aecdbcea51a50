"""From token ids to vectors and from vectors to logits, the vocabulary cut over the ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.engine.model.linear import product
from pdserve.engine.model.shard import Shard


class VocabEmbedding:
    """Each rank holds a run of the vocabulary's rows and gives zeros for tokens of other ranks."""

    def __init__(self, shard: Shard, name: str) -> None:
        self.weight = _own_rows(shard, name)  # [V / ranks, hidden]
        self._first = shard.group.rank * self.weight.shape[0]
        self._group = shard.group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """``[T]`` → ``[T, hidden]``."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._first
        here = (rows >= 0) & (rows < self.weight.shape[0])
        vectors = F.embedding(torch.where(here, rows, 0), self.weight)
        return self._group.all_reduce(vectors * here.unsqueeze(-1))


class VocabHead:
    """Logits of the whole vocabulary on every rank. A tied head shares the embedding's rows."""

    def __init__(self, shard: Shard, name: str, tied: VocabEmbedding | None) -> None:
        weight = _own_rows(shard, name) if tied is None else tied.weight
        self._product = product(weight, None)
        self._vocab_size = shard.spec.vocab_size
        self._group = shard.group

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[R, hidden]`` → ``[R, V]``."""
        return self._group.all_gather(self._product(hidden))[:, : self._vocab_size]


def _own_rows(shard: Shard, name: str) -> Tensor:
    """This rank's rows, equally many on each; zeros where the vocabulary does not divide."""
    spec, group = shard.spec, shard.group
    each = -(-spec.vocab_size // group.size)
    start = min(group.rank * each, spec.vocab_size)
    rows = range(start, min(start + each, spec.vocab_size))
    shape = (spec.vocab_size, spec.hidden_size)
    whole = group.size == 1
    own = shard.weights.take(name, shape, rows=None if whole else rows)
    return F.pad(own, (0, 0, 0, each - len(rows)))
