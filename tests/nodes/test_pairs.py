"""Decode and prefill nodes together, on the ways that matter, one at a time."""

import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import RouteTaken
from tests.nodes.specs import ask
from tests.nodes.world import Pool, World


def make_world(**options) -> World:
    decode = DecodeConfig(
        max_num_batched_tokens=options.pop("decode_tokens", 64),
        max_num_seqs=options.pop("decode_seqs", 8),
        tensor_parallel_size=options.pop("decode_tp", 1),
        headroom_tokens=4,
        local_prefill_tokens=options.pop("local_prefill_tokens", 8),
        fallback_chunk=8,
    )
    prefill = PrefillConfig(
        max_num_batched_tokens=options.pop("prefill_tokens", 16),
        tensor_parallel_size=options.pop("prefill_tp", 1),
    )
    names = options.pop("names", ("p0", "p1"))
    pool = Pool(
        config=prefill,
        num_blocks=options.pop("prefill_blocks", 40),
        block_size=options.pop("prefill_block_size", 4),
    )
    return World(
        Pool(
            config=decode,
            num_blocks=options.pop("decode_blocks", 40),
            block_size=options.pop("decode_block_size", 4),
        ),
        dict.fromkeys(names, pool),
        **options,
    )


@pytest.fixture
def world():
    world = make_world()
    yield world
    world.close()


def test_a_prompt_is_prefilled_there_and_decoded_here(world):
    world.connect_all()
    asked = ask(world.model, 1, prompt_len=21, max_tokens=9, prefill_nodes=("p0",))
    world.submit(asked)
    world.finish()
    assert asked.got == asked.expected
    last = asked.timelines[-1]
    assert last.route is RouteTaken.DISAGGREGATED
    assert last.kv_bytes == 21 * world.decode.ranks.layout.token_bytes
    assert [(stage.name, stage.node) for stage in last.stages] == [
        ("reserve", "decode-0"),
        ("prefill_queue", "p0"),
        ("prefill", "p0"),
        ("transfer", "decode-0"),
        ("decode_queue", "decode-0"),
        ("first_decode", "decode-0"),
    ]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_first_token_comes_with_its_logprobs_from_the_prefill_node(world, num_choices):
    world.connect_all()
    asked = ask(
        world.model,
        1,
        prompt_len=21,
        max_tokens=9,
        prefill_nodes=("p0",),
        num_choices=num_choices,
        logprobs=2,
    )
    world.submit(asked)
    world.bring_all_but("over")  # no KV: nothing was decoded here
    assert [len(got) for got in asked.got.values()] == [1] * num_choices
    world.finish()
    assert asked.got == asked.expected


def test_links_are_made_before_the_first_request(world):
    """A prefill node that no KV could be sent from yet is not asked, and not waited for."""
    for name in ("p0", "p1"):
        world.connect(name)
    world.bring_all_but("over")
    assert world.decode.decode.legs.connected == []
    early = ask(world.model, 1, prompt_len=21, max_tokens=9, prefill_nodes=("p0",))
    world.submit(early)
    world.bring_all_but("over")
    assert early.got == early.expected
    assert early.timelines[-1].route is RouteTaken.FALLBACK
    world.connect_all()
    assert world.decode.decode.legs.connected == ["p0", "p1"]


def test_kv_that_is_not_sent_yet_stays_however_many_prompts_want_its_blocks():
    world = make_world(names=("p0",), prefill_blocks=12, decode_blocks=60)
    try:
        world.connect_all()
        first, *others = (
            ask(world.model, number, prompt_len=21, max_tokens=9, prefill_nodes=("p0",))
            for number in range(1, 7)
        )
        world.submit(first)
        world.bring_all_but("over")  # computed, its first token known, none of its KV sent
        for other in others:
            world.submit(other)
        world.bring_all_but("over")
        assert world.prefills["p0"].node.scheduler.num_waiting == 4
        world.finish()
        for asked in (first, *others):
            assert asked.got == asked.expected
            assert asked.timelines[-1].route is RouteTaken.DISAGGREGATED
    finally:
        world.close()


def test_two_nodes_that_are_both_full_do_not_wait_for_each_other():
    """Each holds blocks for what the other one is to do, and more waits on both."""
    world = make_world(names=("p0",), prefill_blocks=6, decode_blocks=14)
    try:
        world.connect_all()
        asked = [
            ask(world.model, number, prompt_len=20, max_tokens=24, prefill_nodes=("p0",))
            for number in range(8)
        ]
        for each in asked:
            world.submit(each)
        world.bring_all_but("over")
        assert world.decode.decode.scheduler.num_waiting_for_blocks > 0
        assert world.prefills["p0"].prefill.scheduler.num_waiting > 0
        world.finish()
        assert all(each.got == each.expected for each in asked)
    finally:
        world.close()


def test_two_routers_with_other_borders_each_have_their_own_lanes(world):
    """Prompts of one length: each waits in the lane that its router has chosen for it."""
    world.connect_all()
    lanes = {0: 2, 1: 0, 2: 1}
    asked = [
        ask(world.model, i, prompt_len=16, max_tokens=2, prefill_nodes=("p0",), lane=lane)
        for i, lane in lanes.items()
    ]
    for i, one in enumerate(asked):
        world.submit(one, router=i % 2)
    waiting = world.prefills["p0"].prefill.scheduler
    world.bring_all_but("steps")
    assert waiting.num_running + waiting.num_waiting == 2  # one is in the step that is held
    first_tokens: list[int] = []
    while any(not one.is_over for one in asked):
        world.bring(0)
        begun = [i for i, one in enumerate(asked) if one.got[0] and i not in first_tokens]
        first_tokens += begun
    assert first_tokens == [0, 1, 2]  # the first was computed before the others came
