"""Log-probabilities of prompts on a decode node: each comes before the first token, whatever fails.

``tests/nodes/router.py`` asserts that none is left out and that none comes after the first token.
"""

from collections.abc import Iterator

import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import HandoffId
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2
from tests.decode_node.test_node import BEFORE_DECODING, remote
from tests.nodes.world import Pool, World
from tests.oracle import prompt_logprob_of


@pytest.fixture(params=[40])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A decode node of so many blocks between two prefill nodes with small steps."""
    decode = DecodeConfig(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        headroom_tokens=0,
        local_prefill_tokens=8,
        fallback_chunk=8,
    )
    pool = Pool(config=PrefillConfig(max_num_batched_tokens=8), num_blocks=40)
    world = World(Pool(config=decode, num_blocks=request.param), {"p0": pool, "p1": pool})
    world.connect_all()
    yield world
    world.close()


@pytest.mark.parametrize("held", BEFORE_DECODING.values(), ids=BEFORE_DECODING.keys())
@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_prompt_that_is_prefilled_again_is_told_to_its_end(
    world: World, held: tuple[str, ...], num_choices: int
) -> None:
    asked = remote(world, num_choices=num_choices, prompt_logprobs=2)
    world.submit(asked)
    world.bring_all_but(*held)
    world.cut_wire("p0")
    world.finish()
    assert asked.got == asked.expected
    assert asked.num_scored == asked.request.prompt_len


@pytest.mark.parametrize("world", [12], indirect=True)
def test_a_preempted_answer_goes_on_without_them(world: World) -> None:
    old = remote(world, 1, prompt_len=8, max_tokens=36, prefill_nodes=(), prompt_logprobs=0)
    young = remote(world, 2, prompt_len=8, max_tokens=36, prefill_nodes=(), prompt_logprobs=0)
    world.submit(old)
    world.submit(young)
    world.finish()
    assert [old.got, young.got] == [old.expected, young.expected]
    assert young.timelines[-1].num_preemptions > 0


@pytest.mark.parametrize(
    ("prompt_logprobs", "index", "num_tokens"),
    [(None, 1, 1), (2, 0, 1), (2, 20, 2), (2, 1, 21)],
)
def test_what_nobody_asked_for_ends_the_leg(
    world: World, prompt_logprobs: int | None, index: int, num_tokens: int
) -> None:
    asked = remote(world, prompt_logprobs=prompt_logprobs)
    world.submit(asked)
    world.bring_all_but("p0 steps")
    node = world.decode.decode
    leg = node.legs.get(HandoffId("r1", 0, 1))
    assert leg is not None
    logprob = convert.prompt_logprob_to_proto(prompt_logprob_of(1, asked.request.sampling))
    part = session_pb2.PromptPart(
        handoff=convert.handoff_to_proto(leg.handoff),
        index=index,
        logprobs=[logprob] * num_tokens,
    )
    node.on_prefill_outputs(leg.link, session_pb2.PrefillOutputs(prompt_parts=[part]))
    world.finish()
    assert asked.got == asked.expected
    assert "p1" in {stage.node for stage in asked.timelines[-1].stages}
