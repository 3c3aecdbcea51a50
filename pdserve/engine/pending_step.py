"""A step that was launched: on a GPU it may still be running, and later ones behind it."""

from collections.abc import Sequence

import torch

from pdserve.core.request import TokenLogprobs
from pdserve.engine.batch import Batch, Sampled, StepOutput
from pdserve.engine.prompt_scores import PendingScores
from pdserve.engine.sampler import SampledRows
from pdserve.engine.staging import HostCopy


class PendingStep:
    """``sampled`` has a row for each sample of each sampling chunk, in their order."""

    def __init__(
        self,
        batch: Batch,
        sampled: SampledRows | None,
        device: torch.device,
        scores: PendingScores | None = None,
    ) -> None:
        self._batch = batch
        self._sampled = sampled
        self._scores = scores
        self._tokens = HostCopy(device, *(() if sampled is None else (sampled.tokens,)))

    def wait(self) -> StepOutput:
        """The tokens of every sampling chunk, in the chunks' order, once the step is done."""
        copied = self._tokens.wait()
        scored = () if self._scores is None else self._scores.wait()
        if self._sampled is None:
            return StepOutput(step=self._batch.step, sampled=(), scored=scored)
        tokens: list[int] = copied[0].tolist()
        if not self._sampled.has_logprobs and all(c.num_samples <= 1 for c in self._batch.chunks):
            singles = tuple([Sampled((token,)) for token in tokens])
            return StepOutput(step=self._batch.step, sampled=singles, scored=scored)
        outputs = []
        row = 0
        for chunk in self._batch.chunks:
            if chunk.num_samples:
                rows = range(row, row + chunk.num_samples)
                outputs.append(_sampled(self._sampled, tokens, rows))
                row = rows.stop
        return StepOutput(step=self._batch.step, sampled=tuple(outputs), scored=scored)


def _sampled(sampled: SampledRows, tokens: Sequence[int], rows: range) -> Sampled:
    own = tuple(tokens[rows.start : rows.stop])
    if not sampled.has_logprobs:
        return Sampled(tokens=own)
    logprobs: list[TokenLogprobs] = []
    for row in rows:
        if (entry := sampled.logprobs(row)) is not None:
            logprobs.append(entry)
    return Sampled(tokens=own, logprobs=tuple(logprobs))
