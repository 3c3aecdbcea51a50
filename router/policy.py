"""Which nodes a request goes to: a pure function of its length and of what the nodes report.

Owns ``Policy`` and the policies that ``router.policy`` in the cluster file can name. Knows neither
sessions nor clocks; the dispatcher hands it the loads of this moment.

A decode node is chosen first, since a prefill node is of use only to a decode node connected to it.
"""

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.config import PromptClass, RouterConfig
from pdserve.core.errors import ConfigError, NoNodeError
from pdserve.core.request import Route

NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """A ready decode node. ``num_requests`` runs or waits there, what this router sent included."""

    name: str
    num_requests: int
    free_blocks: int
    block_size: int
    prefill_nodes: frozenset[str]  # those it is connected to

    def can_hold(self, num_tokens: int) -> bool:
        return self.free_blocks * self.block_size > num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """A ready prefill node and the prompt tokens ahead of the next request."""

    name: str
    queued_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """All nodes that are connected and ready."""

    decode: tuple[DecodeLoad, ...]
    prefill: tuple[PrefillLoad, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A route and why. ``degraded``: it should have been prefilled elsewhere than it will be."""

    route: Route
    prompt_class: str
    degraded: bool
    explain: str


class Policy(Protocol):
    """Assigns requests to nodes."""

    def choose(self, prompt_len: int, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        """Choose nodes for ``prompt_len`` tokens; those in ``avoid`` only where no other is left.

        Raises NoNodeError where no decode node is ready.
        """
        ...


POLICIES = {"length": "router.policy:LengthPolicy"}


def make_policy(config: RouterConfig, *, prefill_configured: bool) -> Policy:
    """The policy that the cluster file names. Raises ConfigError listing the known ones."""
    if config.policy not in POLICIES:
        near = difflib.get_close_matches(config.policy, POLICIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(POLICIES)
        raise ConfigError(f"router.policy: got {config.policy!r}, known are {known}{hint}")
    module, _, name = POLICIES[config.policy].partition(":")
    policy: Policy = vars(importlib.import_module(module))[name](config, prefill_configured)
    return policy


class LengthPolicy:
    """Classes by prompt length name the prefill nodes; load chooses among them.

    Prompts under ``local_prefill_below`` tokens, and all where the cluster has no prefill nodes,
    are prefilled on the decode node.
    """

    def __init__(self, config: RouterConfig, prefill_configured: bool) -> None:
        self._classes = config.classes
        self._local_below = config.local_prefill_below
        self._prefill_configured = prefill_configured

    def choose(self, prompt_len: int, loads: Loads, avoid: frozenset[str] = NOBODY) -> Decision:
        prompt_class = self._class_of(prompt_len)
        decode = _least_loaded_decode(prompt_len, loads.decode, avoid)
        if not self._prefill_configured:
            return _local(decode, prompt_class, "the cluster has no prefill nodes")
        if prompt_len < self._local_below:
            reason = f"{prompt_len} tokens are under local_prefill_below {self._local_below}"
            return _local(decode, prompt_class, reason)
        reachable = [node for node in loads.prefill if node.name in decode.prefill_nodes]
        if not reachable:
            reason = f"no prefill node is ready and connected to {decode.name}"
            return _local(decode, prompt_class, reason, degraded=True)
        return _disaggregated(decode, prompt_class, reachable, avoid)

    def _class_of(self, prompt_len: int) -> PromptClass:
        return next(c for c in self._classes if c.below is None or prompt_len < c.below)


def _least_loaded_decode(
    prompt_len: int, nodes: tuple[DecodeLoad, ...], avoid: frozenset[str]
) -> DecodeLoad:
    if not nodes:
        raise NoNodeError("no decode node is ready")
    return min(
        nodes,
        key=lambda node: (
            node.name in avoid,
            not node.can_hold(prompt_len),
            node.num_requests,
            -node.free_blocks,
            node.name,
        ),
    )


def _local(
    decode: DecodeLoad, prompt_class: PromptClass, reason: str, *, degraded: bool = False
) -> Decision:
    return Decision(
        route=Route(decode_node=decode.name, prefill_nodes=(), local_allowed=True),
        prompt_class=prompt_class.name,
        degraded=degraded,
        explain=f"class {prompt_class.name}: prefill on {decode.name}, since {reason}",
    )


def _disaggregated(
    decode: DecodeLoad,
    prompt_class: PromptClass,
    reachable: list[PrefillLoad],
    avoid: frozenset[str],
) -> Decision:
    wanted = prompt_class.prefill_nodes
    of_class = [node for node in reachable if not wanted or node.name in wanted]
    degraded = not of_class
    ordered = _by_load(of_class or reachable, avoid)
    loads = ", ".join(f"{node.name} {node.queued_tokens}" for node in ordered)
    fallback = f"; no node of the class ({', '.join(wanted)}) is ready" if degraded else ""
    return Decision(
        route=Route(
            decode_node=decode.name,
            prefill_nodes=tuple(node.name for node in ordered),
            local_allowed=True,
        ),
        prompt_class=prompt_class.name,
        degraded=degraded,
        explain=f"class {prompt_class.name}: decode on {decode.name} ({decode.num_requests} there),"
        f" prefill by least queued tokens: {loads}{fallback}",
    )


def _by_load(nodes: Iterable[PrefillLoad], avoid: frozenset[str]) -> list[PrefillLoad]:
    return sorted(nodes, key=lambda node: (node.name in avoid, node.queued_tokens, node.name))
