"""Log-probabilities of prompt tokens, for the sequences that ask for them.

The row of a token says how likely the next one is, which may be in a later chunk: so the last row
of a chunk is kept until then. Logits are made for a few rows at a time, as those of a whole chunk
would fill the memory. Every rank does this alike, as the logits are gathered from all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.request import PromptLogprob
from pdserve.engine.batch import Carried, Chunk, Joined, Scored, Slot
from pdserve.engine.staging import HostCopy, on_device

ROWS_AT_ONCE = 64


@dataclass(slots=True, kw_only=True)
class _Asked:
    num_top: int
    prompt_len: int
    last_row: Tensor | None = None  # [1, hidden] of the position before the next chunk


class PendingScores:
    """The scores of one step's chunks, on their way to the host."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, int, HostCopy]] = []  # chunk, first position, what comes

    def add(self, chunk: int, start: int, copy: HostCopy) -> None:
        self._copies.append((chunk, start, copy))

    def wait(self) -> tuple[Scored, ...]:
        return tuple(
            Scored(chunk=chunk, start=start, logprobs=_logprobs(copy))
            for chunk, start, copy in self._copies
        )


class PromptScorer:
    """What the slots ask for, and the rows that wait for their next token."""

    def __init__(self, logits: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """``logits``: ``[R, hidden]`` → ``[R, V]``, the model's head."""
        self._logits = logits
        self._device = device
        self._slots: dict[Slot, _Asked] = {}
        self._pending: PendingScores | None = None

    def join(self, joined: Joined) -> None:
        """Set up a slot; its former tenant has left."""
        num_top = joined.sampling.prompt_logprobs
        if num_top is not None:
            self._slots[joined.slot] = _Asked(num_top=num_top, prompt_len=joined.prompt_len)

    def leave(self, slot: Slot) -> None:
        """Forget a slot."""
        self._slots.pop(slot, None)

    def wants_any(self, chunks: Sequence[Chunk]) -> bool:
        """Whether ``score`` has to see the hidden states of all tokens of these chunks."""
        return bool(self._slots) and any(map(self._wants, chunks))

    def score(self, chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """Begin to score a step's chunks, whose tokens' hidden states are ``[T, hidden]``."""
        pending = PendingScores()
        rows = torch.split(hidden, [chunk.length for chunk in chunks])
        for number, (chunk, own) in enumerate(zip(chunks, rows, strict=True)):
            if not self._wants(chunk) or isinstance(chunk.tokens, Carried):
                continue
            asked = self._slots[chunk.slot]
            before, asked.last_row = asked.last_row, own[-1:].clone()
            stop = min(chunk.start + chunk.length, asked.prompt_len)
            start = chunk.start if before is not None else chunk.start + 1
            if start >= stop:
                continue
            known = own if before is None else torch.cat((before, own))
            tokens = chunk.tokens[start - chunk.start : stop - chunk.start]
            copy = self._scores(known[: len(tokens)], tokens, asked.num_top)
            pending.add(number, start, copy)
        self._pending = pending

    def take(self) -> PendingScores | None:
        """The scores of the step that was launched last; None where nothing is asked for."""
        pending, self._pending = self._pending, None
        return pending

    def _wants(self, chunk: Chunk) -> bool:
        asked = self._slots.get(chunk.slot)
        return asked is not None and chunk.start < asked.prompt_len

    def _scores(self, hidden: Tensor, tokens: Sequence[int], num_top: int) -> HostCopy:
        """``hidden`` ``[P, hidden]`` before each of the tokens."""
        targets = on_device(tokens, torch.int64, self._device)
        parts = [
            _score_rows(self._logits(hidden[at : at + ROWS_AT_ONCE]), each, num_top)
            for at, each in zip(
                range(0, len(tokens), ROWS_AT_ONCE), torch.split(targets, ROWS_AT_ONCE), strict=True
            )
        ]
        return HostCopy(self._device, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _score_rows(
    logits: Tensor, targets: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of ``logits`` ``[R, V]`` and ``targets`` ``[R]``: log-probabilities and ranks, both ``[R]``,
    the best log-probabilities and their tokens, both ``[R, num_top]``.
    """
    logits = logits.float()
    total = logits.logsumexp(1, keepdim=True)
    own = logits.gather(1, targets[:, None])
    ranks = (logits > own).sum(1) + 1
    best = logits.topk(min(num_top, logits.shape[1]), dim=1)
    return (own - total).squeeze(1), ranks, best.values - total, best.indices


def _logprobs(copy: HostCopy) -> tuple[PromptLogprob, ...]:
    own, ranks, best, best_ids = (tensor.tolist() for tensor in copy.wait())
    return tuple(
        PromptLogprob(logprob=logprob, rank=rank, top=_in_order(ids, values))
        for logprob, rank, values, ids in zip(own, ranks, best, best_ids, strict=True)
    )


def _in_order(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Best first, then by token id."""
    pairs = zip(ids, logprobs, strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
