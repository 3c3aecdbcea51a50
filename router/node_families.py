"""What the router knows of its nodes, as metrics: what they said of themselves last, and its own
judgement of them. What only a node knows is scraped from the node (``pdserve/rank``).
"""

from collections.abc import Iterator, Mapping, Sequence

from pdserve.core.breaker import BreakerState, Duty
from pdserve.telemetry.exposition import Labels, family
from router.nodes import NodeState, NodeView


def node_lines(views: Sequence[NodeView], headroom_blocks: Mapping[str, int]) -> Iterator[str]:
    yield from family(
        "node_ready",
        "gauge",
        "1: the node is connected and ready.",
        [(_labels(view), int(view.ready)) for view in views],
    )
    yield from family(
        "node_breaker_open",
        "gauge",
        "1: it failed again and again at this stage, and is left alone for a while.",
        [*map(_breaker_sample, views), *_trouble_samples(views)],
    )
    yield from family(
        "kv_headroom_blocks",
        "gauge",
        "KV blocks of a decode node that the router would give to new requests now.",
        [({"node": name}, count) for name, count in headroom_blocks.items()],
    )
    told = [(view, view.state) for view in views if view.state is not None]
    yield from _block_lines(told)
    yield from _state_lines(told)


def _block_lines(told: list[tuple[NodeView, NodeState]]) -> Iterator[str]:
    yield from family(
        "kv_blocks",
        "gauge",
        "The node's KV blocks. Draining ones wait for their last writes, and are used too.",
        [
            ({**_labels(view), "state": word}, count)
            for view, state in told
            for word, count in (
                ("free", state.free_blocks),
                ("used", state.total_blocks - state.free_blocks),
                ("draining", state.draining_blocks),
            )
        ],
    )
    yield from family(
        "pd_kv_transfer_bytes_total",
        "counter",
        "KV payload bytes that the node sent or received.",
        [
            ({**_labels(view), "transport": view.transport or "unknown"}, state.kv_bytes_moved)
            for view, state in told
        ],
    )


def _state_lines(told: list[tuple[NodeView, NodeState]]) -> Iterator[str]:
    states = [state for _, state in told]
    for name, kind, text, values in (
        (
            "num_requests_running",
            "gauge",
            "Sequences in work on the node.",
            [state.running for state in states],
        ),
        (
            "num_requests_waiting",
            "gauge",
            "Sequences waiting on the node.",
            [state.waiting for state in states],
        ),
        (
            "kv_cache_usage_perc",
            "gauge",
            "Used share of the node's KV blocks, 0 to 1.",
            [1 - state.free_blocks / max(state.total_blocks, 1) for state in states],
        ),
        (
            "queued_prefill_tokens",
            "gauge",
            "Prompt tokens that wait on the node.",
            [state.queued_prefill_tokens for state in states],
        ),
        (
            "num_preemptions_total",
            "counter",
            "Sequences that lost their blocks and were computed again.",
            [state.num_preemptions for state in states],
        ),
        (
            "prefix_cache_queries_total",
            "counter",
            "Prompt tokens that were looked for in the node's prefix cache.",
            [state.prefix_cache_queries for state in states],
        ),
        (
            "prefix_cache_hits_total",
            "counter",
            "Those of them whose KV was there.",
            [state.prefix_cache_hits for state in states],
        ),
    ):
        labels = [_labels(view) for view, _ in told]
        yield from family(name, kind, text, zip(labels, values, strict=True))


def _labels(view: NodeView) -> dict[str, str]:
    return {"node": view.name, "role": view.role.value}


def _breaker_sample(view: NodeView) -> tuple[Labels, int]:
    is_open = view.breaker is not BreakerState.CLOSED
    return {"node": view.name, "stage": Duty.DECODE.value, "seen_by": "router"}, int(is_open)


def _trouble_samples(views: Sequence[NodeView]) -> Iterator[tuple[Labels, int]]:
    for view in views:
        for trouble in view.state.troubles if view.state else ():
            labels = {"node": trouble.node, "stage": trouble.stage.value, "seen_by": view.name}
            yield labels, 1
