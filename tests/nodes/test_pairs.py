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
