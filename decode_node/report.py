"""What a decode node tells routers of its load."""

from decode_node.legs import Legs
from decode_node.scheduler import DecodeScheduler
from pdserve.core.node import NodeSpec
from pdserve.rpc.v1 import session_pb2


def report(
    spec: NodeSpec, scheduler: DecodeScheduler, legs: Legs, problem: str | None
) -> session_pb2.NodeStatus:
    """The node's load; ``problem``: why it is not ready."""
    ledger = scheduler.ledger
    return session_pb2.NodeStatus(
        node=spec.name,
        role=spec.role,
        ready=problem is None,
        reason=problem or "",
        total_blocks=ledger.pool.num_blocks,
        free_blocks=ledger.pool.num_free,
        block_size=ledger.block_size,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        waiting_for_blocks=scheduler.num_waiting_for_blocks,
        queued_prefill_tokens=scheduler.num_queued_tokens,
        num_preemptions=scheduler.num_preemptions,
        kv_bytes_moved=legs.kv_bytes_moved,
        draining_blocks=ledger.num_draining_blocks,
        prefix_cache_queries=ledger.num_queried_tokens,
        prefix_cache_hits=ledger.num_hit_tokens,
        context_tokens=scheduler.num_context_tokens,
    )
