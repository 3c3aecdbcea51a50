"""Policy ``length``: classes by prompt length name the prefill nodes; load chooses among them."""

import logging

from pdserve.core.config import RouterConfig
from router.policies.borders import Borders
from router.policies.least import (
    by_queued_tokens,
    fewest_requests,
    queued_words,
    reachable_from,
    ready_decode,
)
from router.policies.locality import Locality
from router.policy import NOBODY, Decision, Loads, Place, Prompt

logger = logging.getLogger(__name__)


class LengthPolicy:
    """The decode node with the fewest requests; prefill nodes of the class by queued tokens.

    With ``rebalance_classes`` the borders of the classes follow the traffic (``borders.py``).
    """

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._locality = Locality(config, prefill_configured)
        self._classes = config.classes
        self._borders = Borders(config.classes)
        self._rebalances = config.rebalance_classes

    def choose(self, prompt: Prompt, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        lane = self._borders.lane_of(prompt.num_tokens)
        decode = fewest_requests(prompt, ready_decode(loads), avoid)
        reachable = reachable_from(decode, loads)
        wanted = self._classes[lane].prefill_nodes
        of_class = [node for node in reachable if not wanted or node.name in wanted]
        ordered = by_queued_tokens(of_class or reachable, avoid)
        why = f"decode on {decode.name} ({decode.num_requests} there)"
        if ordered:
            why += f", prefill by least queued tokens: {queued_words(ordered)}"
        return self._locality.decide(
            prompt,
            decode,
            ordered,
            why,
            lane=lane,
            degraded=None if of_class else f"no node of the class ({', '.join(wanted)}) is ready",
        )

    def placed(self, prompt: Prompt, decision: Decision) -> None:
        if not self._rebalances or decision.place is not Place.PREFILL_NODE:
            return
        if (moved := self._borders.saw(prompt.num_tokens)) is not None:
            logger.info("router.classes rebalanced: %s", moved)
