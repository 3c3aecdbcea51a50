"""Which nodes a request goes to: what a policy is told, what it answers, and the policies' table.

A policy is a pure function of the prompt, of what nodes report and of what this router has sent; it
knows neither sessions nor clocks. What one remembers (whose turn it is, the lengths seen) changes
in ``placed`` alone, so that a question which nobody acts on changes nothing. The policies are in
``router/policies``, one a file.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pdserve.core.config import RouterConfig
from pdserve.core.cost import NodeCosts
from pdserve.core.request import Route

NOBODY: frozenset[str] = frozenset()

# The policies that `router.policy` can name; the names are those of `core/routing_config.py`.
POLICIES = {
    "length": "router.policies.length:LengthPolicy",
    "least_load": "router.policies.least_load:LeastLoadPolicy",
    "slo": "router.policies.slo:SloPolicy",
    "prefix": "router.policies.prefix:PrefixPolicy",
    "round_robin": "router.policies.round_robin:RoundRobinPolicy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """A ready decode node; the numbers include what this router sent.

    ``num_requests`` run or wait there, over ``context_tokens`` tokens of KV; ``queued_tokens`` of
    prompts wait to be computed there, ``prefill_chunk`` in a step (0: none are sent there for it).
    """

    name: str
    num_requests: int
    free_blocks: int
    block_size: int
    prefill_nodes: frozenset[str]  # those it is connected to
    context_tokens: int = 0
    queued_tokens: int = 0
    prefill_chunk: int = 0
    costs: NodeCosts = field(default_factory=NodeCosts)

    def can_hold(self, num_tokens: int) -> bool:
        return self.free_blocks * self.block_size > num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """A ready prefill node and the prompt tokens ahead of the next request, ``prefill_chunk`` of
    which it computes in a step.
    """

    name: str
    queued_tokens: int
    prefill_chunk: int = 0
    costs: NodeCosts = field(default_factory=NodeCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """All nodes that are connected and ready."""

    decode: tuple[DecodeLoad, ...]
    prefill: tuple[PrefillLoad, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be placed. ``cached``: how many of its first tokens this router has sent to a
    node before. A limit that is None is the cluster file's.
    """

    num_tokens: int
    num_choices: int = 1
    cached: Mapping[str, int] = field(default_factory=dict)
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None

    def cached_on(self, node: str) -> int:
        """Tokens that the node need not compute; the last one always is."""
        return min(self.cached.get(node, 0), self.num_tokens - 1)

    def uncached_on(self, node: str) -> int:
        return self.num_tokens - self.cached_on(node)


class Place(StrEnum):
    """Where a prompt is to be prefilled, and the rule that says so; counted in metrics."""

    PREFILL_NODE = "prefill_node"
    NO_PREFILL_NODES = "no_prefill_nodes"  # the cluster has none
    SHORT = "short"  # under local_prefill_below
    UNREACHABLE = "unreachable"  # no prefill node is ready and connected
    EARLIER = "earlier"  # the decode node gives the first token earlier
    LINK_SLOWER = "link_slower"  # moving the KV takes longer than computing it there
    HEAD_ROOM = "head_room"  # policy `slo`: it keeps the limits with more of it

    @property
    def is_local(self) -> bool:
        return self is not Place.PREFILL_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A route and why. ``degraded``: it should have been prefilled elsewhere than it will be."""

    route: Route
    prompt_class: str
    place: Place
    degraded: bool
    explain: str


class Policy(Protocol):
    """Assigns requests to nodes."""

    def choose(self, prompt: Prompt, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        """Choose nodes for the prompt; those in ``avoid`` only where no other is left.

        Raises NoNodeError where no decode node is ready.
        """
        ...

    def placed(self, prompt: Prompt, decision: Decision) -> None:
        """The decision was carried out."""
        ...


def make_policy(config: RouterConfig, *, prefill_configured: bool) -> Policy:
    """The policy that the cluster file names; an unknown name was refused with the file."""
    module, _, name = POLICIES[config.policy].partition(":")
    policy: Policy = vars(importlib.import_module(module))[name](config, prefill_configured)
    return policy
