"""Nodes tell what their steps cost them, once they have run some."""

import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.cost import NodeCosts
from pdserve.rank.running_node import RunningNode
from pdserve.rank.step_meter import StepMeter
from pdserve.rank.trial_steps import trial_limits
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2
from prefill_node.node import PrefillNode
from tests.nodes.site import Site
from tests.nodes.specs import ask, make_spec


def status_of(site: Site, name: str) -> session_pb2.NodeStatus:
    running = site.nodes[name]
    if isinstance(running, RunningNode):
        assert isinstance(running.node, PrefillNode)
        return running.node.status([])
    return running.node.status([])


def costs_of(site: Site, name: str) -> NodeCosts:
    return convert.costs_from_proto(status_of(site, name).costs)


async def test_each_node_learns_from_the_steps_that_it_ran() -> None:
    async with Site() as site:
        router = await site.start_all("p0")
        assert costs_of(site, "p0") == costs_of(site, "decode-0") == NodeCosts()
        away = ask(site.model, 1, prompt_len=21, max_tokens=9, prefill_nodes=("p0",))
        router.submit(away)
        await router.until_over(away)
        prefill, decode = costs_of(site, "p0"), costs_of(site, "decode-0")
        assert prefill.prefill is not None
        assert prefill.decode is None
        assert prefill.link is not None
        assert prefill.link.token_bytes == site.ranks["p0"].layout.token_bytes
        assert decode.decode is not None
        assert decode.prefill is None
        here = ask(site.model, 2, prompt_len=21, max_tokens=9)
        router.submit(here)
        await router.until_over(here)
        assert prefill.prefill.chunk_s(21) > 0
        assert decode.decode.step_s(1, 21) > 0


@pytest.mark.parametrize(
    ("pool", "chunk"),
    [
        (DecodeConfig(local_prefill_tokens=24, max_num_batched_tokens=64), 24),
        (DecodeConfig(local_prefill_tokens=100, max_num_batched_tokens=64), 64),
        (DecodeConfig(local_prefill_tokens=0), 0),
    ],
)
async def test_a_decode_node_tells_how_many_prompt_tokens_it_takes_in_a_step(
    pool: DecodeConfig, chunk: int
) -> None:
    async with Site() as site:
        await site.start_decode(pool)
        assert status_of(site, "decode-0").prefill_chunk == chunk


async def test_a_decode_node_tells_the_context_of_what_runs_there() -> None:
    async with Site() as site:
        router = await site.start_all()
        asked = ask(site.model, 1, prompt_len=21, max_tokens=300)
        router.submit(asked)
        await router.until_begun(asked)
        assert 21 <= status_of(site, "decode-0").context_tokens <= 321
        router.abort(asked)
        await site.until_free()
        assert status_of(site, "decode-0").context_tokens == 0


def measured_on_a_busy_machine(pool: DecodeConfig | PrefillConfig) -> StepMeter:
    """What a node knows whose trials at start took a minute a step."""
    meter = StepMeter()
    for batches in trial_limits(make_spec("x", pool)).trials(block_size=4, num_blocks=64):
        for batch in batches:
            meter.observe(batch, 60.0)
    return meter


async def test_idle_nodes_of_both_roles_measure_again_and_answer_beside_it() -> None:
    prefill = PrefillConfig(max_num_batched_tokens=32, remeasure_idle_s=0.01)
    decode = DecodeConfig(max_num_seqs=32, max_num_batched_tokens=64, remeasure_idle_s=0.01)
    async with Site() as site:
        await site.start_decode(decode, meter=measured_on_a_busy_machine(decode))
        meter = measured_on_a_busy_machine(prefill)
        site.decode.set_prefill_nodes((await site.start_prefill("p0", prefill, meter=meter),))
        router = await site.start_router()
        await router.until(lambda: router.connected == ["p0"])
        await router.until(lambda: all(is_quick(costs_of(site, n)) for n in ("p0", "decode-0")))
        asked = [
            ask(site.model, i, prompt_len=21, max_tokens=9, prefill_nodes=("p0",)) for i in range(9)
        ]
        for one in asked:
            router.submit(one)
            await router.until_over(one)
            assert one.got == one.expected
        await site.until_free()


def is_quick(costs: NodeCosts) -> bool:
    """A step of any kind takes less than ten seconds."""
    assert costs.prefill is not None
    decode_s = 0.0 if costs.decode is None else costs.decode.step_s(8, 200)
    return costs.prefill.chunk_s(32) < 10 and decode_s < 10
