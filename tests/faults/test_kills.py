"""Every part of a cluster is killed or stopped at every stage of a request: right tokens or, where
nobody could have answered, a named error; then all blocks free, no process left, next request fine.

The table is long: `make test-faults` runs it, `make test` a handful of it.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.processes import wait_until_gone
from tests.cluster.served import Served, served
from tests.faults.burst import TIMEOUT_S, Burst
from tests.faults.tiny_model import make_tiny_model
from tests.faults.victims import find, our_processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PARTS = ("prefill front", "prefill rank", "decode front", "decode rank", "router")
STAGES = {  # after how many seconds, then at which token of the request that is farthest
    "queued": (0.05, 0),
    "prefilling": (0.8, 0),
    "transferring": (0.0, 1),  # the first token goes out before its KV has come
    "first token": (0.0, 2),
    "decoding": (0.0, 20),
}
ALWAYS = {
    ("prefill rank", "prefilling", KILL),
    ("prefill front", "transferring", STOP),
    ("decode rank", "decoding", STOP),
    ("decode front", "first token", KILL),
}
CASES = [
    pytest.param(
        *case,
        marks=() if case in ALWAYS else pytest.mark.faults,
        id=" ".join(case[:2]) + f" {case[2].name}",
    )
    for case in itertools.product(PARTS, STAGES, (KILL, STOP))
]
NUM_PROCESSES = 4 * 2 + 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    overrides = {
        "model.source": make_tiny_model(tmp_path_factory.mktemp("model")),
        "model.load_format": "dummy",
        "prefill.replicas": 2,
        "prefill.kv_cache_bytes": 64 << 20,
        "prefill.enable_prefix_caching": False,  # each run is to do the same work
        "decode.replicas": 2,
        "decode.kv_cache_bytes": 64 << 20,
        "decode.enable_prefix_caching": False,
    }
    with served(overrides) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Served) -> list[list[int]]:
    """What the requests are answered when nothing happens."""
    burst = Burst(cluster.grpc_address)
    asyncio.run(burst.run())
    assert [asked.error for asked in burst.requests] == [None] * len(burst.requests)
    return [asked.token_ids for asked in burst.requests]


@pytest.mark.parametrize(("part", "stage", "number"), CASES)
def test_a_part_is_lost_and_nothing_else(
    cluster: Served, undisturbed: list[list[int]], part: str, stage: str, number: signal.Signals
) -> None:
    cluster.wait_until_idle()
    victim = find(cluster, part)
    burst = Burst(cluster.grpc_address)
    asyncio.run(disturbed(burst, stage, victim.pid, number))
    for asked, right in zip(burst.requests, undisturbed, strict=True):
        if part != "router":
            assert asked.error is None, f"{asked.error}; other nodes were there"
            assert asked.token_ids == right
        else:
            assert asked.token_ids == right[: len(asked.token_ids)]
            assert asked.error is not None or asked.token_ids == right
    cluster.wait_for(f"cluster +{victim.name} ended", timeout_s=30)
    cluster.wait_for(f"cluster +{victim.name} serves again", timeout_s=120)
    cluster.wait_until_idle()
    assert wait_until_gone(dict.fromkeys(victim.whole, victim.name), timeout_s=10) == {}
    assert len(our_processes(cluster)) == NUM_PROCESSES
    after = Burst(cluster.grpc_address)
    asyncio.run(after.run())
    assert [asked.token_ids for asked in after.requests] == undisturbed


async def disturbed(burst: Burst, stage: str, pid: int, number: signal.Signals) -> None:
    """Run the burst, and send the signal when it has come to the stage."""
    after_s, num_tokens = STAGES[stage]
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        group.create_task(burst.run())
        await asyncio.sleep(after_s)
        await burst.until_tokens(num_tokens)
        os.kill(pid, number)
