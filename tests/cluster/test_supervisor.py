"""The supervisor against a launcher of fakes: what is started, told, ended and made anew."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.supervisor import Supervisor
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.errors import NodeLostError, RankError
from pdserve.core.node import Role, Standing
from pdserve.core.orders import Drain, Order, Scale
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
    return Supervisor(
        launcher, PLANS, clock=MonotonicClock(), backoff=backoff, on_event=on_event, max_n=16
    )


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


async def test_decode_nodes_hear_how_all_stand(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    assert launcher.nodes["decode-0"][0].told[-1] == (
        "prefill-0#0",
        "prefill-1#0",
        "decode-0#0",
    )
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
        ("prefill-1#0", "decode-0#0"),
        ("prefill-0#1", "prefill-1#0", "decode-0#0"),
    ]
    assert launcher.nodes["prefill-1"][0].num_kills == 0


async def test_a_new_decode_node_hears_of_the_prefill_nodes(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    launcher.nodes["decode-0"][0].death.set_result(RankError("rank 0 died"))
    await launcher.started("decode-0", 2)
    await settled()
    assert launcher.nodes["decode-0"][1].told == [("prefill-0#0", "prefill-1#0", "decode-0#1")]


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


def stand(launcher: FakeLauncher) -> dict[str, Standing]:
    """How the router was told that the nodes stand."""
    return {node.name: node.standing for node in launcher.routers[-1].standings}


async def test_a_node_that_is_being_made_anew_is_told_with_its_reason(
    launcher: FakeLauncher,
) -> None:
    supervisor = make_supervisor(launcher, backoff=Backoff(first_s=60, longest_s=60))
    await supervisor.start()
    launcher.nodes["prefill-0"][0].death.set_result(RankError("rank 0 died"))
    await settled()
    lost = launcher.routers[0].standings[0]
    await supervisor.kill()
    assert (lost.name, lost.standing, lost.reason) == ("prefill-0", Standing.LOST, "rank 0 died")
    assert lost.address is None


async def test_a_drained_node_is_told_and_comes_back(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    router = launcher.routers[0]
    assert "finishes what it holds" in (await router.order(Drain(node="prefill-1"))).text()
    assert stand(launcher)["prefill-1"] is Standing.DRAINING
    router.death.set_result(NodeLostError("router: its process died"))
    await launcher.started("router", 2)
    await settled()
    assert stand(launcher)["prefill-1"] is Standing.DRAINING, "a new router knows it too"
    answer = await launcher.routers[1].order(Drain(node="prefill-1", undo=True))
    assert answer.text() == "prefill-1 takes new requests"
    assert set(stand(launcher).values()) == {Standing.SERVING}


async def test_scaling_up_starts_nodes_that_are_kept(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    answer = await launcher.routers[0].order(Scale(role="decode", count=3))
    assert answer.text() == "decode: 1 -> 3; starting decode-1, decode-2"
    await launcher.started("decode-2", 1)
    await launcher.started("decode-1", 1)
    launcher.nodes["decode-2"][0].death.set_result(RankError("rank 0 died"))
    await launcher.started("decode-2", 2)
    await settled()
    assert list(stand(launcher)) == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert set(stand(launcher).values()) == {Standing.SERVING}


async def test_scaling_down_waits_until_the_node_is_idle_and_ends_it(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    going = launcher.nodes["prefill-1"][0]
    going.idle.clear()
    answer = await launcher.routers[0].order(Scale(role="prefill", count=1))
    assert answer.text() == "prefill: 2 -> 1; ending prefill-1"
    await settled()
    assert stand(launcher)["prefill-1"] is Standing.DRAINING
    assert going.closed_with == []
    refused = await launcher.routers[0].order(Drain(node="prefill-1", undo=True))
    assert refused.error_kind == "invalid_request_error"
    going.idle.set()
    await settled()
    assert going.closed_with == [0.0]
    assert list(stand(launcher)) == ["prefill-0", "decode-0"]
    assert launcher.order.count("prefill-1") == 1


async def test_scaling_down_a_node_that_is_lost_stops_making_it_anew(
    launcher: FakeLauncher,
) -> None:
    supervisor = make_supervisor(launcher, backoff=Backoff(first_s=0.05, longest_s=0.05))
    await supervisor.start()
    launcher.nodes["prefill-1"][0].death.set_result(RankError("rank 0 died"))
    await settled()
    await launcher.routers[0].order(Scale(role="prefill", count=1))
    await asyncio.sleep(0.1)
    assert list(stand(launcher)) == ["prefill-0", "decode-0"]
    assert launcher.order.count("prefill-1") == 1
    await supervisor.kill()


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (Drain(node="decode-9"), "node: got 'decode-9', there are prefill-0, prefill-1, decode-0"),
        (Scale(role="router", count=2), "role: got 'router', allowed are prefill, decode"),
        (Scale(role="decode", count=0), "count: got 0, allowed are 1 to 1024 decode nodes"),
        (Scale(role="prefill", count=-1), "count: got -1, allowed are 0 to 1024 prefill nodes"),
        (Scale(role="decode", count=9999), "count: got 9999, allowed are 1 to 1024"),
    ],
)
async def test_orders_that_cannot_be_are_refused_by_name(
    supervisor: Supervisor, launcher: FakeLauncher, order: Order, problem: str
) -> None:
    await supervisor.start()
    answer = await launcher.routers[0].order(order)
    assert problem in answer.message
    assert answer.error_kind == "invalid_request_error"
    assert len(launcher.order) == len(PLANS) + 1


async def test_a_node_that_hangs_keeps_no_order_waiting(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    launcher.nodes["decode-0"][0].listening.clear()
    for node in ("prefill-0", "prefill-1"):
        await launcher.routers[0].order(Drain(node=node))
        assert stand(launcher)[node] is Standing.DRAINING


async def test_a_router_made_anew_is_told_whether_the_cluster_had_been_ready(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    launcher.routers[0].death.set_result(NodeLostError("killed"))
    await launcher.started("router", 2)
    supervisor.note_ready()
    await settled()
    launcher.routers[1].death.set_result(NodeLostError("killed"))
    await launcher.started("router", 3)
    assert launcher.was_ready == [False, False, True]


async def test_a_drain_says_when_nobody_is_left_to_do_the_work(
    supervisor: Supervisor, launcher: FakeLauncher
) -> None:
    await supervisor.start()
    told = await launcher.routers[0].order(Drain(node="decode-0"))
    assert told.message == (
        "decode-0 takes nothing new and finishes what it holds. Mind: decode-0 is the last decode "
        "node that serves; nobody would decode; --undo lets it in again"
    )
    assert stand(launcher)["decode-0"] is Standing.DRAINING
