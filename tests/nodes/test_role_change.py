"""Nodes that change their role while requests run, with the ranks that they have."""

import asyncio
from dataclasses import replace

from decode_node.server import RunningDecodeNode
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import RouteTaken
from tests.nodes.site import PATIENCE_S, RouterClient, Site
from tests.nodes.specs import ask

DECODE = DecodeConfig(max_num_seqs=32, max_num_batched_tokens=64)
PREFILL = PrefillConfig(max_num_seqs=32, max_num_batched_tokens=64)


def decode_node(site: Site, name: str) -> RunningDecodeNode:
    node = site.nodes[name]
    assert isinstance(node, RunningDecodeNode)
    return node


async def test_two_nodes_swap_their_roles_and_serve_with_the_same_ranks():
    """What their sequences left on the ranks is gone: ``FakeExecutor`` would find it."""
    async with Site() as site:
        router = await site.start_all("p0")
        ranks = dict(site.ranks)
        requests = [
            ask(site.model, i, prompt_len=50, max_tokens=9, prefill_nodes=("p0",) * (i % 2))
            for i in range(6)
        ]
        for asked in requests:
            router.submit(asked)
        await router.until_over(*requests)
        await site.switch("p0", DECODE)
        address = await site.switch("decode-0", PREFILL)
        decode_node(site, "p0").set_prefill_nodes((address,))
        async with swapped(site, "p0") as other:
            await other.until(lambda: other.connected == ["decode-0"])
            requests = [
                ask(
                    site.model,
                    10 + i,
                    prompt_len=50,
                    max_tokens=9,
                    prefill_nodes=("decode-0",) * (i % 2),
                )
                for i in range(6)
            ]
            for asked in requests:
                other.submit(asked)
            await other.until_over(*requests)
            assert [asked.failure for asked in requests] == [None] * 6
            routes = [asked.timelines[-1].route for asked in requests]
            assert routes == [RouteTaken.LOCAL, RouteTaken.DISAGGREGATED] * 3
            await site.until_free()
        assert site.ranks == ranks


async def test_what_a_node_holds_ends_before_it_switches_and_new_work_goes_on_elsewhere():
    async with Site(longest_s=0.02) as site:
        router = await site.start_all("p0", "p1")
        held = ask(site.model, 1, prompt_len=120, max_tokens=6, prefill_nodes=("p0",))
        router.submit(held)
        async with asyncio.timeout(PATIENCE_S):
            while site.prefill.num_prefills == 0 or not any(site.ranks["p0"].blocks_in_use()):
                await site.post.pause(0.05)
        switching = asyncio.create_task(site.switch("p0", DECODE))
        await router.until(lambda: held.is_over or "p0" in router.connected)
        late = ask(site.model, 2, prompt_len=120, max_tokens=6, prefill_nodes=("p0", "p1"))
        router.submit(late)
        await router.until_over(held, late)
        assert held.timelines[-1].route is RouteTaken.DISAGGREGATED
        assert "p0" in {stage.node for stage in held.timelines[-1].stages}
        assert late.timelines[-1].route is RouteTaken.DISAGGREGATED
        assert "p1" in {stage.node for stage in late.timelines[-1].stages}
        await switching
        await router.until(lambda: router.connected == ["p1"])
        await site.until_free()


async def test_a_decode_node_that_switches_finishes_its_requests_and_refuses_others_for_a_while():
    async with Site(longest_s=0.02) as site:
        router = await site.start_all("p0")
        held = ask(site.model, 1, prompt_len=60, max_tokens=40, prefill_nodes=("p0",))
        router.submit(held)
        await router.until_begun(held)
        switching = asyncio.create_task(site.switch("decode-0", PREFILL))
        await router.until(lambda: not router.statuses[-1].ready)
        late = ask(site.model, 2, prompt_len=20, max_tokens=6)
        router.submit(late)
        await router.until_over(held, late)
        assert held.failure is None
        assert held.got == held.expected
        assert (late.failure, late.retryable) == ("node_lost_error", True)
        await switching
        await site.until_free()


async def test_nothing_of_a_prefix_is_found_in_the_role_after():
    """The blocks were named by the node that it was; its successor starts with none."""
    async with Site() as site:
        router = await site.start_all("p0")
        first = ask(site.model, 1, prompt_len=60, max_tokens=3, num_alike=40, prefill_nodes=("p0",))
        router.submit(first)
        await router.until_over(first)
        await site.switch("p0", DECODE)
        async with swapped(site, "p0") as other:
            alike = ask(site.model, 2, prompt_len=60, max_tokens=3, num_alike=40)
            other.submit(alike)
            await other.until_over(alike)
            assert alike.timelines[-1].cached_tokens == 0


async def test_a_node_that_measures_itself_while_idle_switches_in_the_midst_of_it():
    async with Site(longest_s=0.02) as site:
        await site.start_prefill("p0", replace(PREFILL, remeasure_idle_s=0.01))
        async with asyncio.timeout(PATIENCE_S):
            while not any(site.ranks["p0"].blocks_in_use()):
                await site.post.pause(0.05)
        await site.switch("p0", DECODE)
        async with swapped(site, "p0") as other:
            requests = [ask(site.model, i, prompt_len=50, max_tokens=9) for i in range(4)]
            for asked in requests:
                other.submit(asked)
            await other.until_over(*requests)
            assert [asked.failure for asked in requests] == [None] * 4
            await site.until_free()


async def test_a_node_changes_its_role_again_and_again_beside_one_that_does_not():
    async with Site(longest_s=0.005) as site:
        router = await site.start_all("p0", "p1")
        asked = []
        for number in range(4):
            wave = [
                ask(
                    site.model,
                    10 * number + i,
                    prompt_len=70,
                    max_tokens=12,
                    prefill_nodes=("p1", "p0"),
                )
                for i in range(4)
            ]
            for request in wave:
                router.submit(request)
            asked += wave
            pool = PREFILL if number % 2 else DECODE
            address = await site.switch("p1", pool)
            addresses = (site.nodes["p0"].address, *((address,) if pool is PREFILL else ()))
            site.decode.set_prefill_nodes(addresses)
        await router.until_over(*asked)
        assert [request.failure for request in asked] == [None] * len(asked)
        await router.until(lambda: router.connected == ["p0", "p1"])
        await site.until_free()


def swapped(site: Site, name: str) -> "_Session":
    return _Session(decode_node(site, name).address.address)


class _Session:
    """A router's session with a node that has become a decode node."""

    def __init__(self, address: str) -> None:
        self._client = RouterClient(address)

    async def __aenter__(self) -> RouterClient:
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
