"""Policy ``prefix``: where the prompt's beginning was sent before, unless too much waits there."""

from collections.abc import Sequence

from pdserve.core.config import RouterConfig
from router.policies.least import fewest_requests, reachable_from, ready_decode, unfit
from router.policies.locality import Locality
from router.policy import NOBODY, Decision, DecodeLoad, Loads, PrefillLoad, Prompt


class PrefixPolicy:
    """The decode node with the longest beginning, if it has at most ``load_gap`` requests more than
    the least loaded; prefill nodes by the tokens until the prompt is computed there.
    """

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._locality = Locality(config, prefill_configured)
        self._load_gap = config.prefix.load_gap

    def choose(self, prompt: Prompt, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        decode, why = self._decode(prompt, ready_decode(loads), avoid)
        ordered = _by_tokens_left(prompt, reachable_from(decode, loads), avoid)
        if ordered:
            left = ", ".join(f"{node.name} {_tokens_left(prompt, node)}" for node in ordered)
            why += f", prefill by least tokens queued and uncached: {left}"
        return self._locality.decide(prompt, decode, ordered, why)

    def placed(self, prompt: Prompt, decision: Decision) -> None:
        """Remembers nothing; what was sent where is in the prompt's ``cached``."""

    def _decode(
        self, prompt: Prompt, nodes: Sequence[DecodeLoad], avoid: frozenset[str]
    ) -> tuple[DecodeLoad, str]:
        least = fewest_requests(prompt, nodes, avoid)
        longest = min(
            nodes,
            key=lambda node: (
                unfit(prompt, node, avoid),
                -prompt.cached_on(node.name),
                node.num_requests,
                node.name,
            ),
        )
        known = prompt.cached_on(longest.name)
        if not known:
            words = "no node was sent its beginning"
            return least, f"decode on {least.name} ({least.num_requests} there), {words}"
        gap = longest.num_requests - least.num_requests
        words = f"{known} of {prompt.num_tokens} tokens were sent to {longest.name}"
        if gap > self._load_gap:
            words += f", but it has {gap} requests more, load_gap {self._load_gap}"
            return least, f"decode on {least.name} ({least.num_requests} there), {words}"
        return longest, f"decode on {longest.name} ({longest.num_requests} there), {words}"


def _tokens_left(prompt: Prompt, node: PrefillLoad) -> int:
    return node.queued_tokens + prompt.uncached_on(node.name)


def _by_tokens_left(
    prompt: Prompt, nodes: Sequence[PrefillLoad], avoid: frozenset[str]
) -> list[PrefillLoad]:
    return sorted(
        nodes, key=lambda node: (node.name in avoid, _tokens_left(prompt, node), node.name)
    )
