"""Where the processes of a node go: one placement group per node, all of it on one host.

    bundle 0        the front
    bundle 1 + r    rank r

Owns what each process asks Ray for. The router goes to the host of `pdserve serve`, whose address
and ports it was given.
"""

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from pdserve.cluster.resolve import FRONT_CPUS, ROUTER_CPUS, NodePlan

# Every process is watched by the supervisor, which ends and remakes nodes whole.
ACTOR_OPTIONS = {"max_restarts": 0, "max_task_retries": 0}
_LEAST_CPUS = 0.001  # a bundle may not be empty
_LEAST_SHARE = 0.001  # of a resource that only says which hosts will do


def rank_resources(plan: NodePlan) -> dict[str, float]:
    """What one rank of this node asks for."""
    asked = plan.pool.resources
    resources = {"CPU": asked.num_cpus, "GPU": asked.num_gpus}
    return {name: amount for name, amount in resources.items() if amount} or {"CPU": _LEAST_CPUS}


def bundles(plan: NodePlan) -> list[dict[str, float]]:
    """The placement group of one node: the front, then its ranks."""
    front = {"CPU": FRONT_CPUS}
    if plan.pool.host_resource is not None:
        front[plan.pool.host_resource] = _LEAST_SHARE
    return [front, *[rank_resources(plan)] * plan.pool.tensor_parallel_size]


def place(plan: NodePlan) -> PlacementGroup:
    """Ask for room for a node on one host. Actors wait until there is some."""
    group = placement_group(bundles(plan), strategy="STRICT_PACK", name=plan.name)
    assert isinstance(group, PlacementGroup)
    return group


def front_options(group: PlacementGroup) -> dict[str, Any]:
    """Ray's options of a front actor."""
    return {
        **ACTOR_OPTIONS,
        "num_cpus": FRONT_CPUS,
        "scheduling_strategy": _in_bundle(group, 0),
    }


def rank_options(group: PlacementGroup, plan: NodePlan, rank: int) -> dict[str, Any]:
    """Ray's options of a rank actor."""
    resources = rank_resources(plan)
    return {
        **ACTOR_OPTIONS,
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": _in_bundle(group, 1 + rank),
        # On a cluster that others started; it has to be there before the worker process is.
        "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
    }


def router_options() -> dict[str, Any]:
    """Ray's options of the router actor."""
    here = ray.get_runtime_context().get_node_id()
    return {
        **ACTOR_OPTIONS,
        "num_cpus": ROUTER_CPUS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here, soft=False),
    }


def _in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
