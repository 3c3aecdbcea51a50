"""Whether a node may change its role, and what it is then: pure.

A node keeps what its ranks were started with: device, tensor-parallel size, block size, KV cache,
steps and sequences at once. What only the front goes by comes from the section of the new role.
Pools whose sizes differ work together anyway, so only these orders are refused: those that would
leave nobody to decode, or to prefill where decode nodes do not, and a decode node that could not
hold what the others promise.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.scaling import role_named, template_of
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.errors import InvalidRequestError
from pdserve.core.node import NodeStanding, Role, Standing
from pdserve.core.orders import ChangeRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a decode node takes: tokens of a sequence, and choices of a request, at most."""

    max_model_len: int
    max_choices: int


def changed(
    order: ChangeRole,
    plan: NodePlan,
    templates: Mapping[Role, NodePlan],
    others: Collection[NodeStanding],
) -> NodePlan:
    """The node in its new role. ``others`` are all nodes but this one.

    Raises InvalidRequestError naming what is wrong.
    """
    role = role_named(order.role)
    if plan.role is role:
        raise InvalidRequestError("role", f"{plan.name} is a {role} node already")
    pool = template_of(role, templates).pool
    if (problem := what_is_missing(plan, templates, others)) is not None:
        raise InvalidRequestError("node", problem)
    return replace(plan, role=role, pool=_pool_of(plan.pool, pool))


def what_is_missing(
    plan: NodePlan, templates: Mapping[Role, NodePlan], others: Collection[NodeStanding]
) -> str | None:
    """What nobody would do without the node; None where others do all of it."""
    decode = templates[Role.DECODE].pool
    assert isinstance(decode, DecodeConfig)
    if plan.role is Role.PREFILL and decode.local_prefill_tokens:
        return None
    if any(n.role is plan.role and n.standing is Standing.SERVING for n in others):
        return None
    nobody = "nobody would decode"
    if plan.role is Role.PREFILL:
        nobody = "decode.local_prefill_tokens is 0: nobody would prefill"
    return f"{plan.name} is the last {plan.role} node that serves; {nobody}"


def check_capacity(name: str, node: Capacity, promised: Capacity) -> None:
    """Refuse a decode node that would not take what the others do. Raises InvalidRequestError."""
    if node.max_model_len < promised.max_model_len:
        raise InvalidRequestError(
            "node",
            f"{name} holds sequences of {node.max_model_len} tokens, but decode nodes take "
            f"{promised.max_model_len}; its pool needs more kv_cache_bytes",
        )
    if node.max_choices < promised.max_choices:
        raise InvalidRequestError(
            "node",
            f"{name} takes requests of {node.max_choices} choices, but decode nodes take "
            f"{promised.max_choices}; its pool needs more max_num_seqs or max_num_batched_tokens",
        )


def max_choices(plan: NodePlan) -> int:
    """Choices of one request that the node would take at most, as a decode node."""
    return min(plan.pool.max_num_seqs, plan.pool.max_num_batched_tokens)


def _pool_of(
    own: PrefillConfig | DecodeConfig, wanted: PrefillConfig | DecodeConfig
) -> PrefillConfig | DecodeConfig:
    return replace(
        wanted,
        tensor_parallel_size=own.tensor_parallel_size,
        resources=own.resources,
        host_resource=own.host_resource,
        device=own.device,
        num_threads=own.num_threads,
        max_num_batched_tokens=own.max_num_batched_tokens,
        max_num_seqs=own.max_num_seqs,
        gpu_memory_utilization=own.gpu_memory_utilization,
        kv_cache_bytes=own.kv_cache_bytes,
        block_size=own.block_size,
        attention_backend=own.attention_backend,
    )
