"""Routes requests: what nodes say and this router knows goes to the policy; what it decides is
noted when it is carried out.

Asking changes nothing, so a dry run is the same question. Knows no session; the nodes' views are
arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.core.errors import NoNodeError
from pdserve.core.node import NodeAddress, Role
from pdserve.core.prefix_hash import PrefixHash
from pdserve.core.request import RouteTaken
from router.load_book import LoadBook, Placement
from router.nodes import NodeView
from router.policies.prediction import Candidate, candidates, predict
from router.policy import NOBODY, Decision, Loads, Policy, Prompt
from router.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be routed. Limits in milliseconds; None: the cluster file's."""

    num_tokens: int
    token_ids: Sequence[int] = ()  # () in a dry run that has only a length
    num_choices: int = 1
    cache_salt: bytes = b""
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A decision and what it was made of. ``predicted`` is what the request should see."""

    decision: Decision
    predicted: Candidate
    prompt: Prompt
    loads: Loads
    blocks: tuple[PrefixHash, ...] = field(repr=False)

    @property
    def planned(self) -> RouteTaken:
        prefill_nodes = self.decision.route.prefill_nodes
        return RouteTaken.DISAGGREGATED if prefill_nodes else RouteTaken.LOCAL

    def candidates(self) -> list[Candidate]:
        """Every way that was open."""
        return list(candidates(self.prompt, self.loads))


class Routing:
    """``caching``: the roles whose nodes keep the KV of prompts for others that begin alike."""

    def __init__(self, policy: Policy, index: PrefixIndex, caching: frozenset[Role]) -> None:
        self._policy = policy
        self._index = index
        self._caching = caching
        self._load_book = LoadBook()

    def ask(self, ask: Ask, views: Sequence[NodeView], avoid: frozenset[str] = NOBODY) -> Routed:
        """Where it would go now. Raises NoNodeError where no decode node is ready."""
        blocks = self._index.blocks_of(ask.token_ids, ask.cache_salt) if self._caching else ()
        prompt = Prompt(
            num_tokens=ask.num_tokens,
            num_choices=ask.num_choices,
            cached=self._index.cached(blocks, self._caching_nodes(views)),
            ttft_limit_s=_seconds(ask.ttft_slo_ms),
            tpot_limit_s=_seconds(ask.tpot_slo_ms),
        )
        loads = self._load_book.loads(views)
        left_out = _left_out(views)
        try:
            decision = self._policy.choose(prompt, loads, avoid)
        except NoNodeError as error:
            raise NoNodeError(f"{error}{left_out}") from error
        if left_out:
            decision = replace(decision, explain=decision.explain + left_out)
        return Routed(
            decision=decision,
            predicted=_predict(prompt, decision, loads),
            prompt=prompt,
            loads=loads,
            blocks=blocks,
        )

    def place(self, routed: Routed, views: Sequence[NodeView]) -> Placement:
        """The request was sent as decided."""
        prompt, decision = routed.prompt, routed.decision
        decode_node, prefill_nodes = decision.route.decode_node, decision.route.prefill_nodes
        prefill_node = prefill_nodes[0] if prefill_nodes else None
        placement = Placement(
            decode_node=decode_node,
            prefill_node=prefill_node,
            num_choices=prompt.num_choices,
            prefill_len=prompt.uncached_on(prefill_node or decode_node),
            context_len=prompt.num_tokens * prompt.num_choices,
        )
        self._load_book.add(placement)
        self._policy.placed(prompt, decision)
        used = {decode_node, prefill_node}
        self._index.sent(routed.blocks, [n for n in self._caching_nodes(views) if n.name in used])
        return placement

    def prefilled(self, placement: Placement) -> None:
        """The first token came."""
        self._load_book.prefilled(placement)

    def remove(self, placement: Placement) -> None:
        """The request is not on its nodes any more."""
        self._load_book.remove(placement)

    def heard(self, node: str) -> None:
        """The node told its state."""
        self._load_book.heard(node)

    def _caching_nodes(self, views: Sequence[NodeView]) -> list[NodeAddress]:
        return [view.address for view in views if view.role in self._caching]


def _left_out(views: Sequence[NodeView]) -> str:
    """The nodes that drain or keep failing, for who asks why a request went elsewhere."""
    names = [f"{view.name} ({view.barred})" for view in views if view.barred is not None]
    return f"; left out: {', '.join(names)}" if names else ""


def _predict(prompt: Prompt, decision: Decision, loads: Loads) -> Candidate:
    route = decision.route
    decode = next(node for node in loads.decode if node.name == route.decode_node)
    first = route.prefill_nodes[0] if route.prefill_nodes else None
    prefill = next((node for node in loads.prefill if node.name == first), None)
    return predict(prompt, decode, prefill)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
