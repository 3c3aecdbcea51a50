"""Whether a prompt is prefilled on its decode node: the rules that all policies share.

In this order: a cluster without prefill nodes, prompts under ``local_prefill_below``, no prefill
node within reach, and, where ``router.conditional`` is enabled, what predictions say: the decode
node gives the first token earlier, or the KV would be longer on its way than in computing.
"""

from collections.abc import Sequence

from pdserve.core.config import RouterConfig
from pdserve.core.request import Route
from router.policies.prediction import Candidate, local_compute_s, predict
from router.policies.words import milliseconds
from router.policy import Decision, DecodeLoad, Place, PrefillLoad, Prompt

Verdict = tuple[Place, str]


class Locality:
    """Turns the nodes that a policy has chosen into its decision."""

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._classes = config.classes
        self._local_below = config.local_prefill_below
        self._conditional = config.conditional
        self._prefill_configured = prefill_configured

    def lane_of(self, prompt_len: int) -> int:
        """The prompt's length class, by the borders of the cluster file."""
        return next(
            lane for lane, c in enumerate(self._classes) if c.below is None or prompt_len < c.below
        )

    def class_name(self, lane: int) -> str:
        return self._classes[lane].name

    def must_be_local(self, prompt: Prompt) -> Verdict | None:
        """The rules that need no node; None: it may go to a prefill node."""
        if not self._prefill_configured:
            return Place.NO_PREFILL_NODES, "the cluster has no prefill nodes"
        if prompt.num_tokens < self._local_below:
            words = f"{prompt.num_tokens} tokens are under local_prefill_below {self._local_below}"
            return Place.SHORT, words
        return None

    def decide(
        self,
        prompt: Prompt,
        decode: DecodeLoad,
        ordered: Sequence[PrefillLoad],
        why: str,
        *,
        lane: int | None = None,
        degraded: str | None = None,
    ) -> Decision:
        """The decision for a decode node and the prefill nodes in the order of preference.

        ``why`` says why these; ``degraded`` why they are not those that should serve it. ``lane``
        None: the one by the cluster file's borders.
        """
        lane = self.lane_of(prompt.num_tokens) if lane is None else lane
        name = self.class_name(lane)
        local = self.must_be_local(prompt)
        if local is None and not ordered:
            words = f"no prefill node is ready and connected to {decode.name}"
            local = Place.UNREACHABLE, words
        against = ""
        if local is None and self._conditional.enabled:
            local, against = self._weigh(prompt, decode, ordered[0])
        if local is not None:
            return local_decision(name, decode, *local, why=why)
        return Decision(
            route=Route(
                decode_node=decode.name,
                prefill_nodes=tuple(node.name for node in ordered),
                local_allowed=True,
                lane=lane,
            ),
            prompt_class=name,
            place=Place.PREFILL_NODE,
            degraded=degraded is not None,
            explain=f"class {name}: {why}" + "".join(f"; {t}" for t in (degraded, against) if t),
        )

    def _weigh(
        self, prompt: Prompt, decode: DecodeLoad, prefill: PrefillLoad
    ) -> tuple[Verdict | None, str]:
        """Why to prefill on the decode node, or None and why not."""
        rules = self._conditional
        length = prompt.uncached_on(decode.name)
        if not decode.prefill_chunk:
            return None, f"{decode.name} takes no prompts"
        if length > rules.max_local_tokens:
            return None, f"{length} uncached tokens, max_local_tokens {rules.max_local_tokens}"
        here, there = predict(prompt, decode, None), predict(prompt, decode, prefill)
        if here.ttft_s is None or there.ttft_s is None:
            return None, "their costs are not known yet"
        bound_ms, longest_s = rules.max_step_ms, here.neighbours_s
        if bound_ms is not None and longest_s is not None and 1000 * longest_s > bound_ms:
            return None, (
                f"a chunk on {decode.name} would make steps of {milliseconds(longest_s)}, "
                f"max_step_ms {bound_ms:g}"
            )
        figures = (
            f"first token in {milliseconds(here.ttft_s)} from {decode.name}, "
            f"{milliseconds(there.ttft_s)} from {prefill.name}"
        )
        if here.ttft_s * (1 + rules.margin) < there.ttft_s:
            return (Place.EARLIER, figures), ""
        slower = self._slower_link(prompt, decode, there)
        return (None, figures) if slower is None else ((Place.LINK_SLOWER, slower), "")

    def _slower_link(self, prompt: Prompt, decode: DecodeLoad, there: Candidate) -> str | None:
        compute_s, transfer_s = local_compute_s(prompt, decode), there.transfer_s
        assert compute_s is not None
        assert there.prefill is not None
        if transfer_s is None or compute_s * (1 + self._conditional.margin) >= transfer_s:
            return None
        return (
            f"moving its KV from {there.prefill.name} takes {milliseconds(transfer_s)}, computing "
            f"it on {decode.name} {milliseconds(compute_s)}"
        )


def local_decision(
    prompt_class: str, decode: DecodeLoad, place: Place, reason: str, *, why: str
) -> Decision:
    """Prefill on the decode node."""
    return Decision(
        route=Route(decode_node=decode.name, prefill_nodes=(), local_allowed=True),
        prompt_class=prompt_class,
        place=place,
        degraded=place is Place.UNREACHABLE,
        explain=f"class {prompt_class}: prefill on {decode.name}, since {reason}; {why}",
    )
