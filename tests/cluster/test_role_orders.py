"""Orders that change a node's role, carried out by the supervisor on fakes."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.supervisor import Supervisor
from pdserve.core.clock import MonotonicClock
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.errors import RankError
from pdserve.core.node import Role, Standing
from pdserve.core.orders import ChangeRole, Drain, Order, Scale
from tests.cluster.fake_cluster import FakeLauncher, FakeRunning

PLANS = (
    NodePlan(name="prefill-0", role=Role.PREFILL, device="cpu", pool=PrefillConfig()),
    NodePlan(name="decode-0", role=Role.DECODE, device="cpu", pool=DecodeConfig()),
    NodePlan(name="decode-1", role=Role.DECODE, device="cpu", pool=DecodeConfig()),
)
TO_PREFILL = ChangeRole(node="decode-1", role="prefill")
BEGUN = "decode-1: decode -> prefill, once it has finished what it holds"


class World:
    """A supervisor that has started, and what it said."""

    def __init__(self, *, drain_timeout_s: float = 60) -> None:
        self.launcher = FakeLauncher()
        self.events: list[str] = []
        self.supervisor = Supervisor(
            self.launcher,
            PLANS,
            clock=MonotonicClock(),
            backoff=Backoff(first_s=0.01, longest_s=0.02, settled_s=60),
            on_event=self.events.append,
            max_n=16,
            drain_timeout_s=drain_timeout_s,
        )

    def node(self, name: str) -> FakeRunning:
        return self.launcher.nodes[name][-1]

    async def order(self, order: Order) -> str:
        return (await self.launcher.routers[-1].order(order)).text()

    async def refusal(self, order: Order) -> str:
        answer = await self.launcher.routers[-1].order(order)
        assert answer.error_kind == "invalid_request_error", answer
        return answer.message

    def standings(self) -> dict[str, tuple[Role, Standing]]:
        """As the router was told."""
        told = self.launcher.routers[-1].standings
        return {node.name: (node.role, node.standing) for node in told}

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.supervisor.start()
    yield world
    await world.supervisor.kill()


async def test_a_node_drains_switches_and_serves_in_its_new_role(world: World) -> None:
    node = world.node("decode-1")
    node.idle.clear()
    node.switching.clear()
    assert await world.order(TO_PREFILL) == BEGUN
    assert world.standings()["decode-1"] == (Role.DECODE, Standing.DRAINING)
    assert node.switched_to == []
    node.idle.set()
    await world.until(lambda: bool(node.switched_to))
    assert world.standings()["decode-1"] == (Role.PREFILL, Standing.SWITCHING)
    others = ("prefill-0#0", "decode-0#0")
    assert world.launcher.routers[0].told[-1] == others, "the router has left it"
    assert world.node("decode-0").told[-1] == others
    node.switching.set()
    await world.until(lambda: "decode-1 serves as a prefill node" in world.events)
    assert world.standings()["decode-1"] == (Role.PREFILL, Standing.SERVING)
    everybody = ("prefill-0#0", "decode-1#0/1", "decode-0#0")
    assert world.node("decode-0").told[-1] == everybody, "decode nodes are to connect to it"
    assert world.launcher.order.count("decode-1") == 1, "its processes are the same"
    assert node.num_kills == 0
    (plan,) = node.switched_to
    assert isinstance(plan.pool, PrefillConfig)


async def test_roles_change_back_and_forth(world: World) -> None:
    wanted: list[str] = []
    for role in ("prefill", "decode") * 2:
        await world.order(ChangeRole(node="decode-1", role=role))
        wanted.append(f"decode-1 serves as a {role} node")
        await world.until(lambda: world.events == wanted)
    assert world.standings()["decode-1"] == (Role.DECODE, Standing.SERVING)
    told = ("prefill-0#0", "decode-0#0", "decode-1#0/4")
    assert world.node("decode-1").told[-1] == told, "it hears of its prefill nodes again"


async def test_a_node_that_an_operator_drained_joins_again_in_its_new_role(world: World) -> None:
    await world.order(Drain(node="decode-1"))
    await world.order(TO_PREFILL)
    await world.until(lambda: bool(world.events))
    assert world.standings()["decode-1"] == (Role.PREFILL, Standing.SERVING)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (TO_PREFILL, "node: decode-1 is changing its role by an earlier `role`"),
        (ChangeRole(node="decode-1", role="decode"), "node: decode-1 is changing its role"),
        (Drain(node="decode-1"), "node: decode-1 is changing its role by an earlier `role`"),
        (Drain(node="decode-1", undo=True), "node: decode-1 is changing its role"),
        (Scale(role="prefill", count=1), "node: decode-1 is changing its role"),
        (ChangeRole(node="decode-0", role="prefill"), "node: decode-0 is the last decode node"),
        (ChangeRole(node="decode-9", role="prefill"), "node: got 'decode-9', there are prefill-0"),
    ],
)
async def test_another_order_meanwhile_is_refused_by_name(
    world: World, order: Order, problem: str
) -> None:
    world.node("decode-1").idle.clear()
    await world.order(TO_PREFILL)
    assert (await world.refusal(order)).startswith(problem)


async def test_a_node_that_is_being_ended_changes_no_role(world: World) -> None:
    world.node("decode-1").idle.clear()
    await world.order(Scale(role="decode", count=1))
    assert "being ended by an earlier `scale`" in await world.refusal(TO_PREFILL)


async def test_a_node_that_does_not_run_changes_no_role(world: World) -> None:
    world.launcher.refuse["decode-1"] = [RankError("no memory")] * 99
    world.node("decode-1").death.set_result(RankError("rank 0 died"))
    await world.until(lambda: world.standings()["decode-1"][1] is not Standing.SERVING)
    assert "try when it serves" in await world.refusal(TO_PREFILL)


async def test_a_decode_node_that_would_hold_less_than_the_others_is_refused(world: World) -> None:
    world.node("prefill-0").max_model_len = 100
    refused = await world.refusal(ChangeRole(node="prefill-0", role="decode"))
    assert refused.startswith(
        "node: prefill-0 holds sequences of 100 tokens, but decode nodes take"
    )
    assert world.standings()["prefill-0"] == (Role.PREFILL, Standing.SERVING)


async def test_a_node_that_dies_while_it_drains_is_made_anew_in_the_role_it_was_ordered(
    world: World,
) -> None:
    node = world.node("decode-1")
    node.idle.clear()
    await world.order(TO_PREFILL)
    node.death.set_result(RankError("rank 0 died"))
    await world.launcher.started("decode-1", 2)
    await world.until(lambda: "decode-1 serves again" in world.events)
    await world.until(lambda: world.standings()["decode-1"] == (Role.PREFILL, Standing.SERVING))
    assert node.switched_to == []
    assert await world.order(ChangeRole(node="decode-1", role="decode")), "it is free for orders"


async def test_a_node_that_dies_while_it_switches_is_made_anew_in_its_new_role(
    world: World,
) -> None:
    node = world.node("decode-1")
    node.switching.clear()
    await world.order(TO_PREFILL)
    await world.until(lambda: bool(node.switched_to))
    node.death.set_result(RankError("rank 0 died"))
    await world.launcher.started("decode-1", 2)
    await world.until(lambda: world.standings()["decode-1"] == (Role.PREFILL, Standing.SERVING))
    assert world.node("decode-0").told[-1] == ("prefill-0#0", "decode-1#1", "decode-0#0")


async def test_a_node_that_cannot_switch_is_ended_whole_and_made_anew_in_its_new_role(
    world: World,
) -> None:
    node = world.node("decode-1")
    node.refuse_switch = RankError("step 3: no output within 120 s")
    await world.order(TO_PREFILL)
    await world.launcher.started("decode-1", 2)
    await world.until(lambda: world.standings()["decode-1"] == (Role.PREFILL, Standing.SERVING))
    assert "decode-1 did not become a prefill node: step 3: no output within 120 s" in world.events
    assert node.num_kills >= 1


async def test_a_node_that_never_gets_idle_stays_what_it_is() -> None:
    world = World(drain_timeout_s=0.05)
    await world.supervisor.start()
    node = world.node("decode-1")
    node.idle.clear()
    await world.order(TO_PREFILL)
    await world.until(lambda: bool(world.events))
    assert world.events == ["decode-1 stays a decode node: it is not idle after 0.05 s"]
    assert world.standings()["decode-1"] == (Role.DECODE, Standing.SERVING)
    node.death.set_result(RankError("rank 0 died"))
    await world.launcher.started("decode-1", 2)
    await world.until(lambda: world.standings()["decode-1"] == (Role.DECODE, Standing.SERVING))
    await world.supervisor.kill()


async def test_a_router_made_anew_meanwhile_hears_how_it_stands(world: World) -> None:
    world.node("decode-1").switching.clear()
    await world.order(TO_PREFILL)
    await world.until(lambda: bool(world.node("decode-1").switched_to))
    world.launcher.routers[0].death.set_result(RankError("killed"))
    await world.launcher.started("router", 2)
    await world.until(lambda: bool(world.launcher.routers[1].standings))
    assert world.standings()["decode-1"] == (Role.PREFILL, Standing.SWITCHING)
    world.node("decode-1").switching.set()
    await world.until(lambda: world.standings()["decode-1"] == (Role.PREFILL, Standing.SERVING))


async def test_scaling_counts_a_node_in_its_new_role(world: World) -> None:
    await world.order(TO_PREFILL)
    await world.until(lambda: bool(world.events))
    assert await world.order(Scale(role="prefill", count=1)) == "prefill: 2 -> 1; ending decode-1"
    assert await world.order(Scale(role="decode", count=2)) == (
        "decode: 1 -> 2; starting decode-2"
    ), "the name is still in use"


async def test_closing_meanwhile_ends_everything(world: World) -> None:
    world.node("decode-1").switching.clear()
    await world.order(TO_PREFILL)
    await world.until(lambda: bool(world.node("decode-1").switched_to))
    await world.supervisor.close(0.0)
    assert world.node("decode-1").closed_with == [0.0]
    assert len(world.launcher.order) == len(PLANS) + 1
