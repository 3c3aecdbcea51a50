"""The supervisor against a launcher of fakes: what is started, told, ended and made anew."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.supervisor import Backoff, Supervisor
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.errors import NodeLostError, RankError
from pdserve.core.node import Role
from tests.cluster.fake_cluster import FakeLauncher

PLANS = (
    NodePlan(name="prefill-0", role=Role.PREFILL, device="cpu", pool=PrefillConfig()),
    NodePlan(name="prefill-1", role=Role.PREFILL, device="cpu", pool=PrefillConfig()),
    NodePlan(name="decode-0", role=Role.DECODE, device="cpu", pool=DecodeConfig()),
)
FAST = Backoff(first_s=0.01, longest_s=0.02, settled_s=60)


@pytest.fixture
async def launcher() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
async def supervisor(launcher: FakeLauncher) -> AsyncIterator[Supervisor]:
    supervisor = make_supervisor(launcher)
    yield supervisor
    await supervisor.kill()


def make_supervisor(
    launcher: FakeLauncher, *, backoff: Backoff = FAST, on_event: Callable[[str], None] = print
) -> Supervisor:
    return Supervisor(launcher, PLANS, clock=MonotonicClock(), backoff=backoff, on_event=on_event)


async def settled() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_router_starts_last_and_hears_of_all_nodes(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    assert sorted(launcher.order[:-1]) == ["decode-0", "prefill-0", "prefill-1"]
    assert launcher.order[-1] == "router"
    assert launcher.routers[0].told == [("prefill-0#0", "prefill-1#0", "decode-0#0")]


async def test_decode_nodes_hear_of_prefill_nodes_only(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    assert launcher.nodes["decode-0"][0].told[-1] == ("prefill-0#0", "prefill-1#0")
    assert launcher.nodes["prefill-0"][0].told == []


async def test_a_node_that_cannot_start_ends_the_others_and_is_the_error(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    launcher.refuse["prefill-1"] = [RankError("no memory")]
    with pytest.raises(RankError, match="no memory"):
        await supervisor.start()
    assert launcher.routers == []
    assert [node.num_kills for nodes in launcher.nodes.values() for node in nodes] == [1] * len(
        launcher.nodes
    )


async def test_a_router_that_cannot_start_ends_the_nodes(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    launcher.refuse["router"] = [NodeLostError("port taken")]
    with pytest.raises(NodeLostError, match="port taken"):
        await supervisor.start()
    assert [nodes[0].num_kills for nodes in launcher.nodes.values()] == [1, 1, 1]


async def test_a_dead_node_is_ended_whole_announced_and_made_anew(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    dead = launcher.nodes["prefill-0"][0]
    dead.death.set_result(RankError("rank 0 died"))
    await launcher.started("prefill-0", 2)
    await settled()
    assert dead.num_kills == 1
    assert launcher.routers[0].told[1:] == [
        ("prefill-1#0", "decode-0#0"),
        ("prefill-0#1", "prefill-1#0", "decode-0#0"),
    ]
    assert launcher.nodes["decode-0"][0].told[-2:] == [
        ("prefill-1#0",),
        ("prefill-0#1", "prefill-1#0"),
    ]
    assert launcher.nodes["prefill-1"][0].num_kills == 0


async def test_a_new_decode_node_hears_of_the_prefill_nodes(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    launcher.nodes["decode-0"][0].death.set_result(RankError("rank 0 died"))
    await launcher.started("decode-0", 2)
    await settled()
    assert launcher.nodes["decode-0"][1].told == [("prefill-0#0", "prefill-1#0")]


async def test_starts_that_fail_are_tried_again(launcher: FakeLauncher) -> None:
    events: list[str] = []
    supervisor = make_supervisor(launcher, on_event=events.append)
    await supervisor.start()
    launcher.refuse["prefill-0"] = [RankError("one"), RankError("two")]
    launcher.nodes["prefill-0"][0].death.set_result(RankError("rank 0 died"))
    await launcher.started("prefill-0", 2)
    await settled()
    await supervisor.kill()
    assert events == [
        "prefill-0 ended: rank 0 died; making it anew",
        "prefill-0 did not start again: one",
        "prefill-0 did not start again: two",
        "prefill-0 serves again",
    ]


async def test_a_dead_router_is_made_anew_and_told_the_nodes(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    launcher.routers[0].death.set_result(NodeLostError("router: its process died"))
    await launcher.started("router", 2)
    await settled()
    assert launcher.routers[1].told == [("prefill-0#0", "prefill-1#0", "decode-0#0")]


async def test_nothing_is_made_anew_after_close(launcher: FakeLauncher) -> None:
    supervisor = make_supervisor(launcher)
    await supervisor.start()
    await supervisor.close(3.0)
    for nodes in launcher.nodes.values():
        nodes[0].death.set_result(RankError("killed"))
    launcher.routers[0].death.set_result(NodeLostError("killed"))
    await asyncio.sleep(5 * FAST.longest_s)
    assert len(launcher.order) == len(PLANS) + 1
    assert launcher.routers[0].closed_with == [3.0]
    assert [nodes[0].closed_with for nodes in launcher.nodes.values()] == [[0.0]] * 3


async def test_close_during_back_off_starts_nothing(launcher: FakeLauncher) -> None:
    supervisor = make_supervisor(launcher, backoff=Backoff(first_s=0.05, longest_s=0.05))
    await supervisor.start()
    launcher.nodes["prefill-0"][0].death.set_result(RankError("rank 0 died"))
    await settled()
    await supervisor.close(0.0)
    await asyncio.sleep(0.1)
    assert launcher.order.count("prefill-0") == 1


async def test_waits_between_starts_double_up_to_the_longest(launcher: FakeLauncher) -> None:
    supervisor = make_supervisor(
        launcher, backoff=Backoff(first_s=0.02, longest_s=0.04, settled_s=60)
    )
    await supervisor.start()
    launcher.refuse["prefill-0"] = [RankError(str(i)) for i in range(3)]
    began_s = asyncio.get_running_loop().time()
    launcher.nodes["prefill-0"][0].death.set_result(RankError("rank 0 died"))
    await launcher.started("prefill-0", 2)
    waited_s = asyncio.get_running_loop().time() - began_s
    await supervisor.kill()
    assert waited_s >= 0.02 + 0.04 + 0.04 + 0.04
