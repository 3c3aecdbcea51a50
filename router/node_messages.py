"""Session messages of nodes to what the router works with. Plain copies."""

from collections.abc import Iterable

from pdserve.core.request import RequestKey
from pdserve.rpc.convert import (
    costs_from_proto,
    failure_from_proto,
    output_from_proto,
    prompt_output_from_proto,
    timeline_from_proto,
    trouble_from_proto,
)
from pdserve.rpc.v1 import session_pb2
from router.nodes import NodeState, RankPlace, StepNews


def step_news(node: str, outputs: session_pb2.StepOutputs) -> StepNews:
    return StepNews(
        node=node,
        timelines=tuple(
            (RequestKey(item.request_id, item.attempt), timeline_from_proto(item.timeline))
            for item in outputs.timelines
        ),
        outputs=tuple(output_from_proto(item) for item in outputs.outputs),
        failures=tuple(failure_from_proto(item) for item in outputs.failures),
        prompts=tuple(map(prompt_output_from_proto, outputs.prompt_outputs)),
    )


def state_of(status: session_pb2.NodeStatus) -> NodeState:
    return NodeState(
        ready=status.ready,
        reason=status.reason or None,
        total_blocks=status.total_blocks,
        free_blocks=status.free_blocks,
        block_size=status.block_size,
        running=status.running,
        waiting=status.waiting,
        waiting_for_blocks=status.waiting_for_blocks,
        draining_blocks=status.draining_blocks,
        queued_prefill_tokens=status.queued_prefill_tokens,
        num_preemptions=status.num_preemptions,
        kv_bytes_moved=status.kv_bytes_moved,
        connected_prefill_nodes=tuple(status.connected_prefill_nodes),
        troubles=tuple(map(trouble_from_proto, status.troubles)),
        prefix_cache_queries=status.prefix_cache_queries,
        prefix_cache_hits=status.prefix_cache_hits,
        context_tokens=status.context_tokens,
        prefill_chunk=status.prefill_chunk,
        costs=costs_from_proto(status.costs),
    )


def rank_places(ranks: Iterable[session_pb2.RankInfo]) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank=item.rank, pid=item.pid, host=item.host) for item in ranks)
