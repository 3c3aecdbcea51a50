"""Orders by load that several policies use: by counts, which are always known."""

from collections.abc import Iterable, Sequence

from pdserve.core.errors import NoNodeError
from router.policy import DecodeLoad, Loads, PrefillLoad, Prompt


def ready_decode(loads: Loads) -> Sequence[DecodeLoad]:
    """Raises NoNodeError where there is none."""
    if not loads.decode:
        raise NoNodeError("no decode node is ready")
    return loads.decode


def reachable_from(decode: DecodeLoad, loads: Loads) -> list[PrefillLoad]:
    return [node for node in loads.prefill if node.name in decode.prefill_nodes]


def unfit(prompt: Prompt, node: DecodeLoad, avoid: frozenset[str]) -> tuple[bool, bool]:
    """What every policy looks at first: did it fail the request, has it no room for it now."""
    return node.name in avoid, not node.can_hold(prompt.num_tokens)


def fewest_requests(
    prompt: Prompt, nodes: Sequence[DecodeLoad], avoid: frozenset[str]
) -> DecodeLoad:
    return min(
        nodes,
        key=lambda node: (
            unfit(prompt, node, avoid),
            node.num_requests,
            -node.free_blocks,
            node.name,
        ),
    )


def by_queued_tokens(nodes: Iterable[PrefillLoad], avoid: frozenset[str]) -> list[PrefillLoad]:
    return sorted(nodes, key=lambda node: (node.name in avoid, node.queued_tokens, node.name))


def queued_words(nodes: Iterable[PrefillLoad]) -> str:
    return ", ".join(f"{node.name} {node.queued_tokens}" for node in nodes)
