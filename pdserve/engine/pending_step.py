"""A step that was launched: on a GPU it may still be running, and later ones behind it."""

from collections.abc import Sequence

import torch

from pdserve.core.request import TokenLogprobs
from pdserve.engine.batch import Batch, Sampled, StepOutput
from pdserve.engine.prompt_scores import PendingScores
from pdserve.engine.sampler import SampledRows
from pdserve.engine.staging import HostCopy


class PendingStep:
    """``sampled`` has a row for each sample of each sampling chunk, in their order. ``began`` is a
    ``mark`` from before the step.
    """

    def __init__(
        self,
        batch: Batch,
        sampled: SampledRows | None,
        device: torch.device,
        scores: PendingScores | None = None,
        began: torch.cuda.Event | None = None,
    ) -> None:
        self._batch = batch
        self._sampled = sampled
        self._scores = scores
        self._began = began
        self._tokens = HostCopy(device, *(() if sampled is None else (sampled.tokens,)))

    def wait(self) -> StepOutput:
        """The tokens of every sampling chunk, in the chunks' order, once the step is done."""
        copied = self._tokens.wait()
        return StepOutput(
            step=self._batch.step,
            sampled=() if self._sampled is None else self._by_chunk(self._sampled, copied[0]),
            scored=() if self._scores is None else self._scores.wait(),
            device_s=self._tokens.since_s(self._began),
        )

    def _by_chunk(self, sampled: SampledRows, copied: torch.Tensor) -> tuple[Sampled, ...]:
        tokens: list[int] = copied.tolist()
        counts = [chunk.num_samples for chunk in self._batch.chunks if chunk.num_samples]
        if not sampled.has_logprobs and len(counts) == len(tokens):  # one each
            return tuple([Sampled((token,)) for token in tokens])
        outputs = []
        row = 0
        for count in counts:
            outputs.append(_sampled(sampled, tokens, range(row, row + count)))
            row += count
        return tuple(outputs)


def _sampled(sampled: SampledRows, tokens: Sequence[int], rows: range) -> Sampled:
    own = tuple(tokens[rows.start : rows.stop])
    if not sampled.has_logprobs:
        return Sampled(tokens=own)
    logprobs: list[TokenLogprobs] = []
    for row in rows:
        if (entry := sampled.logprobs(row)) is not None:
            logprobs.append(entry)
    return Sampled(tokens=own, logprobs=tuple(logprobs))
