"""Policy ``round_robin``: ready nodes in turn, by name, whatever their load."""

from collections.abc import Sequence
from typing import TypeVar

from pdserve.core.config import RouterConfig
from router.policies.least import reachable_from, ready_decode, unfit
from router.policies.locality import Locality
from router.policy import NOBODY, Decision, DecodeLoad, Loads, PrefillLoad, Prompt

Node = TypeVar("Node", DecodeLoad, PrefillLoad)


class RoundRobinPolicy:
    """Remembers the names that were used last."""

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._locality = Locality(config, prefill_configured)
        self._last_decode: str | None = None
        self._last_prefill: str | None = None

    def choose(self, prompt: Prompt, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        in_turn = _in_turn(ready_decode(loads), self._last_decode)
        decode = min(in_turn, key=lambda node: unfit(prompt, node, avoid))  # the first of them
        prefill = _in_turn(reachable_from(decode, loads), self._last_prefill)
        prefill.sort(key=lambda node: node.name in avoid)
        why = f"decode on {decode.name} in turn after {self._last_decode or 'none'}"
        if prefill:
            why += f", prefill on {prefill[0].name} after {self._last_prefill or 'none'}"
        return self._locality.decide(prompt, decode, prefill, why)

    def placed(self, prompt: Prompt, decision: Decision) -> None:
        self._last_decode = decision.route.decode_node
        if decision.route.prefill_nodes:
            self._last_prefill = decision.route.prefill_nodes[0]


def _in_turn(nodes: Sequence[Node], last: str | None) -> list[Node]:
    """By name, beginning with the one after the last used."""
    return sorted(nodes, key=lambda node: (last is not None and node.name <= last, node.name))
