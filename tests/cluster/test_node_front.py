"""A node's front changes its role, with the ranks that it has."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.cluster.incarnation import Incarnation
from pdserve.cluster.node_front import NodeFront, front_of
from pdserve.cluster.protection import Protection
from pdserve.cluster.resolve import Hardware, NodePlan, ResolvedCluster, resolve
from pdserve.cluster.role_change import changed
from pdserve.cluster.site import Site
from pdserve.core.config import ClusterConfig, DecodeConfig, KvCacheConfig, PrefillConfig
from pdserve.core.errors import RankError
from pdserve.core.model_identity import ModelIdentity
from pdserve.core.node import NodeStanding, Role, Standing
from pdserve.core.orders import ChangeRole
from pdserve.core.request import RouteTaken
from pdserve.rank.step_meter import StepMeter
from pdserve.rpc.network import GrpcNetwork
from tests.fabric import Fabric, FabricRanks, make_layout
from tests.nodes.site import RouterClient
from tests.nodes.specs import MODEL, ask
from tests.oracle import FakeModel
from tests.post import RunningPost
from tests.prompts import VOCAB_SIZE

BLOCK_SIZE = 4
CONFIG = ClusterConfig(
    prefill=PrefillConfig(max_num_batched_tokens=32, max_num_seqs=8),
    decode=DecodeConfig(max_num_batched_tokens=64, max_num_seqs=8, local_prefill_tokens=16),
    kv_cache=KvCacheConfig(block_size=BLOCK_SIZE),
)
OTHERS = (NodeStanding(name="decode-1", role=Role.DECODE, standing=Standing.SERVING),)


class Place:
    """Where fronts run, and what they are told."""

    def __init__(self) -> None:
        self.cluster: ResolvedCluster = resolve(CONFIG, MODEL, Hardware(num_cpus=None, num_gpus=0))
        self.site = Site(
            cluster=self.cluster,
            model_dir=Path("model"),
            model_identity=ModelIdentity(config_digest="f", weights=()),
            run_token="t",
            log_folder="logs",
            admin_token="a",
            protection=Protection(secret="s3cret"),
        )
        self.plans = {plan.name: plan for plan in self.cluster.nodes}
        self.templates = {plan.role: plan for plan in self.cluster.nodes}
        self.fabric = Fabric(RunningPost(), FakeModel(VOCAB_SIZE))
        self.ranks: dict[str, FabricRanks] = {}
        self.meters: dict[str, StepMeter] = {}
        self.fronts: dict[str, NodeFront] = {}

    async def start(self, name: str) -> NodeFront:
        incarnation = self.incarnation(name)
        layout = make_layout(block_size=BLOCK_SIZE, tp_size=1)
        self.ranks[name] = self.fabric.start(incarnation.id, layout, num_blocks=64, num_slots=8)
        self.meters[name] = StepMeter()
        front = await front_of(incarnation, self.ranks[name], self.meters[name])
        self.fronts[name] = front
        return front

    def incarnation(self, name: str) -> Incarnation:
        return Incarnation(
            id=f"{name}#1",
            site=self.site,
            plan=self.plans[name],
            start_timeout_s=5.0,
            step_timeout_s=5.0,
        )

    async def switch(self, name: str, role: Role) -> None:
        await self.fronts[name].switch(f"{name}#2", self.in_role(name, role))

    def in_role(self, name: str, role: Role) -> NodePlan:
        order = ChangeRole(node=name, role=role)
        self.plans[name] = changed(order, self.plans[name], self.templates, OTHERS)
        return self.plans[name]

    def standings(self) -> tuple[NodeStanding, ...]:
        return tuple(
            NodeStanding(
                name=name,
                role=front.facts.address.role,
                standing=Standing.SERVING,
                address=front.facts.address,
            )
            for name, front in self.fronts.items()
        )


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    yield place
    await asyncio.gather(*(front.close(0.0) for front in place.fronts.values()))


async def test_a_front_goes_on_under_another_name_and_address(place: Place) -> None:
    front = await place.start("prefill-0")
    before = front.facts
    await place.switch("prefill-0", Role.DECODE)
    after = front.facts
    assert (after.address.name, after.address.role) == ("prefill-0", Role.DECODE)
    assert after.address.incarnation == place.ranks["prefill-0"].incarnation == "prefill-0#2"
    assert after.address.address != before.address.address
    assert after.max_model_len == before.max_model_len


async def test_costs_that_only_the_new_role_has_are_measured_before_it_serves(
    place: Place,
) -> None:
    await place.start("prefill-0")
    meter = place.meters["prefill-0"]
    assert meter.costs().prefill is not None
    assert meter.costs().decode is None
    await place.switch("prefill-0", Role.DECODE)
    assert meter.costs().prefill is not None, "what was known stays"
    assert meter.costs().decode is not None


async def test_two_fronts_swap_their_roles_and_meet_again(place: Place) -> None:
    """One hears of its prefill nodes while it is still becoming a decode node."""
    one, other = await place.start("prefill-0"), await place.start("decode-0")
    await other.set_nodes(place.standings())
    await place.switch("decode-0", Role.PREFILL)
    switching = asyncio.create_task(place.switch("prefill-0", Role.DECODE))
    await asyncio.sleep(0)
    await one.set_nodes(place.standings())
    await switching
    network = GrpcNetwork(place.site.access)
    router = RouterClient(one.facts.address.address, network=network)
    try:
        await router.until(lambda: router.connected == ["decode-0"])
        asked = ask(place.fabric.model, 1, prompt_len=50, max_tokens=9, prefill_nodes=("decode-0",))
        router.submit(asked)
        await router.until_over(asked)
        assert asked.got == asked.expected
        assert asked.timelines[-1].route is RouteTaken.DISAGGREGATED
    finally:
        await router.close()


async def test_a_front_fails_with_the_node_that_it_is_now(place: Place) -> None:
    front = await place.start("prefill-0")
    await place.switch("prefill-0", Role.DECODE)
    place.ranks["prefill-0"].fail(RankError("rank 0 died"))
    async with asyncio.timeout(5):
        assert "rank 0 died" in str(await front.failed)


async def test_a_change_of_role_without_ranks_is_an_error(place: Place) -> None:
    await place.start("prefill-0")
    switching = asyncio.create_task(place.switch("prefill-0", Role.DECODE))
    await asyncio.sleep(0)
    place.ranks["prefill-0"].fail(RankError("rank 0 died"))
    with pytest.raises(RankError, match="rank 0 died"):
        await switching
