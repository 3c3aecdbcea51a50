"""Nodes and their loads for tests of policies, with costs that are easy to reckon with."""

from typing import Any

from pdserve.core.config import PromptClass, RouterConfig
from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost
from router.policy import DecodeLoad, Loads, PrefillLoad, Prompt

CLASSES = (
    PromptClass(name="short", below=100, prefill_nodes=("p0", "p1")),
    PromptClass(name="medium", below=1000),
    PromptClass(name="long", prefill_nodes=("p2",)),
)
CONFIG = RouterConfig(classes=CLASSES, local_prefill_below=10)
ALL = frozenset({"p0", "p1", "p2"})
UNKNOWN = NodeCosts()

# 1 ms a prompt token; 10 ms a decode step and 1 ms for each sequence in it; 0.1 ms a token's KV.
PREFILL = PrefillCost(a=0.0, b=0.001, c=0.0)
DECODE = DecodeCost(a=0.010, b=0.001, c=0.0)
LINK = LinkCost(latency_s=0.0, s_per_byte=1e-6, token_bytes=100)
DECODE_COSTS = NodeCosts(prefill=PREFILL, decode=DECODE)
PREFILL_COSTS = NodeCosts(prefill=PREFILL, link=LINK)


def prompt(num_tokens: int, **fields: Any) -> Prompt:
    return Prompt(num_tokens=num_tokens, **fields)


def decode(name: str, num_requests: int = 0, free_blocks: int = 1000, **fields: Any) -> DecodeLoad:
    settings: dict[str, Any] = {
        "block_size": 16,
        "prefill_nodes": ALL,
        "prefill_chunk": 256,
    } | fields
    return DecodeLoad(name=name, num_requests=num_requests, free_blocks=free_blocks, **settings)


def prefill(costs: NodeCosts = UNKNOWN, **queued_tokens: int) -> tuple[PrefillLoad, ...]:
    """Prefill nodes by name."""
    return tuple(
        PrefillLoad(name=name, queued_tokens=queued, prefill_chunk=512, costs=costs)
        for name, queued in queued_tokens.items()
    )


def loads(*nodes: DecodeLoad, prefill: tuple[PrefillLoad, ...] = ()) -> Loads:
    return Loads(decode=nodes, prefill=prefill)
