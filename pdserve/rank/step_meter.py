"""What steps cost on this node, learned from every step that it runs.

A chunk of one token counts as a decode, a longer one as a piece of a prompt: below the schedulers
there is no other difference. A step with both gives a sample of prefill, less what its decodes cost
by what is known. Durations are the owner's, by its clock; nothing here knows the time.
"""

from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost, attended
from pdserve.core.cost_fit import CostFit
from pdserve.engine.batch import Batch

FIT_EVERY = 8  # steps; a fit takes about a millisecond


class StepMeter:
    """Fed with each step, asked for the costs about once a second."""

    def __init__(self) -> None:
        self._prefill_fit = CostFit()
        self._decode_fit = CostFit()
        self._prefill: PrefillCost | None = None
        self._decode: DecodeCost | None = None
        self._num_unfitted = 0

    def observe(self, batch: Batch, duration_s: float) -> None:
        """The step took so long, from when the ranks were free for it to its output."""
        num_decodes = context_tokens = num_prompt = 0
        pairs = 0.0
        for chunk in batch.chunks:
            length = chunk.length
            if length == 1:
                num_decodes += 1
                context_tokens += chunk.start + 1
            else:
                num_prompt += length
                pairs += attended(length, chunk.start)
        self._num_unfitted += 1
        if not num_prompt:
            if num_decodes:
                self._decode_fit.observe(duration_s, num_decodes, context_tokens)
        elif not num_decodes:
            self._prefill_fit.observe(duration_s, num_prompt, pairs)
        elif self._decode is not None:
            beside_s = self._decode.marginal_s(num_decodes, context_tokens)
            self._prefill_fit.observe(duration_s - beside_s, num_prompt, pairs)

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
