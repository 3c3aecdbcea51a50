"""What a node's processes ask Ray for."""

from typing import Any

import pytest

from pdserve.cluster.placement import bundles
from pdserve.cluster.resolve import NodePlan
from pdserve.core.config import DecodeConfig, ResourcesConfig
from pdserve.core.node import Role


@pytest.mark.parametrize(
    ("num_ranks", "resources", "expected"),
    [
        (1, {}, [{"CPU": 1.0}, {"CPU": 1.0}]),
        (3, {"num_cpus": 2.0}, [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0}]),
        (2, {"num_gpus": 1.0}, [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 2]),
        (1, {"num_cpus": 0.0, "num_gpus": 0.5}, [{"CPU": 1.0}, {"GPU": 0.5}]),
        (1, {"num_cpus": 0.0}, [{"CPU": 1.0}, {"CPU": 0.001}]),
    ],
)
def test_a_node_is_one_bundle_for_the_front_and_one_for_each_rank(
    num_ranks: int, resources: dict[str, Any], expected: list[dict[str, float]]
) -> None:
    pool = DecodeConfig(tensor_parallel_size=num_ranks, resources=ResourcesConfig(**resources))
    plan = NodePlan(name="decode-0", role=Role.DECODE, device="cpu", pool=pool)
    assert bundles(plan) == expected


def test_a_node_is_bound_to_hosts_that_offer_a_resource_by_a_crumb_of_it() -> None:
    pool = DecodeConfig(tensor_parallel_size=2, host_resource="h200")
    plan = NodePlan(name="decode-0", role=Role.DECODE, device="cpu", pool=pool)
    assert bundles(plan) == [{"CPU": 1.0, "h200": 0.001}, {"CPU": 1.0}, {"CPU": 1.0}]
