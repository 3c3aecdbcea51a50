"""What steps cost on this node, learned from every step that it runs.

A chunk of one token counts as a decode, a longer one as a piece of a prompt: below the schedulers
there is no other difference. A step with both gives a sample of prefill, less what its decodes cost
by what is known. Durations are the owner's, by its clock; nothing here knows the time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost, attended
from pdserve.core.cost_fit import CostFit, Sample
from pdserve.engine.batch import Batch
from pdserve.rank.step_tally import StepTally

FIT_EVERY = 8  # steps; a fit takes about a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a step computes: how many tokens of prompts and how many decodes, and over how much."""

    num_prompt: int
    pairs: float
    num_decodes: int
    context_tokens: int

    @classmethod
    def of(cls, batch: Batch) -> "_Work":
        chunks = [(chunk.start, chunk.length) for chunk in batch.chunks]
        decodes = [start for start, length in chunks if length == 1]
        prompts = [(start, length) for start, length in chunks if length > 1]
        return cls(
            num_prompt=sum(length for _, length in prompts),
            pairs=sum(attended(length, start) for start, length in prompts),
            num_decodes=len(decodes),
            context_tokens=sum(decodes) + len(decodes),
        )

    def prefill_sample(self, duration_s: float) -> Sample:
        return Sample(duration_s, self.num_prompt, self.pairs)

    def decode_sample(self, duration_s: float) -> Sample:
        return Sample(duration_s, self.num_decodes, self.context_tokens)


class StepMeter:
    """Fed with each step, asked for the costs about once a second."""

    def __init__(self) -> None:
        self.tally = StepTally()
        self._prefill_fit = CostFit()
        self._decode_fit = CostFit()
        self._prefill: PrefillCost | None = None
        self._decode: DecodeCost | None = None
        self._num_unfitted = 0

    def observe(self, batch: Batch, duration_s: float, device_s: float | None = None) -> None:
        """The step took so long, from when the ranks were free for it to its output, and so much of
        a GPU's time.
        """
        self.tally.observe(batch, duration_s, device_s)
        work = _Work.of(batch)
        self._num_unfitted += 1
        if not work.num_prompt:
            if work.num_decodes:
                self._decode_fit.observe(*work.decode_sample(duration_s))
        elif not work.num_decodes:
            self._prefill_fit.observe(*work.prefill_sample(duration_s))
        elif self._decode is not None:
            beside_s = self._decode.marginal_s(work.num_decodes, work.context_tokens)
            self._prefill_fit.observe(*work.prefill_sample(duration_s - beside_s))

    def mend(self, trials: Iterable[tuple[Batch, float]]) -> dict[str, float]:
        """Steps of an idle node, each of one kind of work, took so long: bring the costs to their
        pace. Returns by which factor those of each kind changed, where they did.
        """
        prefills, decodes = [], []
        for batch, duration_s in trials:
            work = _Work.of(batch)
            if work.num_prompt:
                prefills.append(work.prefill_sample(duration_s))
            else:
                decodes.append(work.decode_sample(duration_s))
        factors = {
            "prefill": self._prefill_fit.mend(prefills),
            "decode": self._decode_fit.mend(decodes),
        }
        changed = {kind: factor for kind, factor in factors.items() if factor != 1.0}
        if changed:
            self._fit()
        return changed

    def costs(self, link: LinkCost | None = None) -> NodeCosts:
        """All that is known now; ``link`` is measured elsewhere."""
        if self._num_unfitted >= FIT_EVERY or (self._num_unfitted and self._is_new):
            self._fit()
        return NodeCosts(prefill=self._prefill, decode=self._decode, link=link)

    @property
    def _is_new(self) -> bool:
        return self._prefill is None and self._decode is None

    def _fit(self) -> None:
        self._num_unfitted = 0
        if (found := self._decode_fit.coefficients()) is not None:
            self._decode = DecodeCost(a=found[0], b=found[1], c=found[2])
        if (found := self._prefill_fit.coefficients()) is not None:
            self._prefill = PrefillCost(a=found[0], b=found[1], c=found[2])
