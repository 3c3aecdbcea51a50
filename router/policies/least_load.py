"""Policy ``least_load``: the nodes on which a request waits least, by predicted time.

While some node has not told its costs, counts are compared instead: times and counts do not mix.
"""

from collections.abc import Sequence

from pdserve.core.config import RouterConfig
from router.policies.least import (
    by_queued_tokens,
    fewest_requests,
    queued_words,
    reachable_from,
    ready_decode,
    unfit,
)
from router.policies.locality import Locality
from router.policies.prediction import prefill_wait_s, tpot_s
from router.policies.words import milliseconds
from router.policy import NOBODY, Decision, DecodeLoad, Loads, PrefillLoad, Prompt


class LeastLoadPolicy:
    """A decode node's wait: the prompts that it has to compute itself, and its step."""

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._locality = Locality(config, prefill_configured)

    def choose(self, prompt: Prompt, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        decode, decode_words = _decode(prompt, ready_decode(loads), avoid)
        ordered, prefill_words = _prefill(reachable_from(decode, loads), avoid)
        why = decode_words + (f", prefill {prefill_words}" if ordered else "")
        return self._locality.decide(prompt, decode, ordered, why)

    def placed(self, prompt: Prompt, decision: Decision) -> None:
        """Remembers nothing."""


def _decode(
    prompt: Prompt, nodes: Sequence[DecodeLoad], avoid: frozenset[str]
) -> tuple[DecodeLoad, str]:
    waits: dict[str, float] = {}
    for node in nodes:
        step_s = tpot_s(prompt, node)
        queue_s = prefill_wait_s(node) if node.queued_tokens else 0.0
        if step_s is None or queue_s is None:
            chosen = fewest_requests(prompt, nodes, avoid)
            return chosen, f"decode on {chosen.name} ({chosen.num_requests} there)"
        waits[node.name] = queue_s + step_s
    chosen = min(nodes, key=lambda n: (unfit(prompt, n, avoid), waits[n.name], n.name))
    others = ", ".join(f"{name} {milliseconds(wait_s)}" for name, wait_s in waits.items())
    return chosen, f"decode on {chosen.name} by least wait: {others}"


def _prefill(
    nodes: Sequence[PrefillLoad], avoid: frozenset[str]
) -> tuple[Sequence[PrefillLoad], str]:
    waits: dict[str, float] = {}
    for node in nodes:
        wait_s = prefill_wait_s(node)
        if wait_s is None:
            ordered = by_queued_tokens(nodes, avoid)
            return ordered, f"by least queued tokens: {queued_words(ordered)}"
        waits[node.name] = wait_s
    ordered = sorted(nodes, key=lambda n: (n.name in avoid, waits[n.name], n.name))
    words = ", ".join(f"{node.name} {milliseconds(waits[node.name])}" for node in ordered)
    return ordered, f"by least wait: {words}"
