"""Prompts that begin alike: what is known of them is neither computed nor moved again."""

import pytest

from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import RouteTaken
from pdserve.core.timeline import Timeline
from tests.nodes.specs import Asked, ask
from tests.nodes.world import Pool, World

PROMPT_LEN = 21


@pytest.fixture
def start():
    """Starts a decode node and two prefill nodes with small steps."""
    worlds = []

    def start(*, decode=(4, 1, True), prefill=(4, 1, True), decode_blocks: int = 60) -> World:
        """Each node's block size, TP size, and whether it caches."""
        decode_config = DecodeConfig(
            max_num_seqs=8,
            headroom_tokens=4,
            local_prefill_tokens=8,
            tensor_parallel_size=decode[1],
            enable_prefix_caching=decode[2],
        )
        prefill_config = PrefillConfig(
            max_num_batched_tokens=8,
            tensor_parallel_size=prefill[1],
            enable_prefix_caching=prefill[2],
        )
        pool = Pool(config=prefill_config, num_blocks=60, block_size=prefill[0])
        world = World(
            Pool(config=decode_config, num_blocks=decode_blocks, block_size=decode[0]),
            {"p0": pool, "p1": pool},
        )
        worlds.append(world)
        world.connect_all()
        return world

    yield start
    for world in worlds:
        world.close()


@pytest.fixture
def world(start):
    return start()


def same(world: World, number: int, **options) -> Asked:
    """One of many requests with the same prompt, each with an answer of its own."""
    fields = {
        "prompt_len": PROMPT_LEN,
        "num_alike": PROMPT_LEN,
        "max_tokens": 9,
        "min_tokens": 5,
        "prefill_nodes": ("p0",),
        **options,
    }
    return ask(world.model, number, **fields)


def answer(world: World, asked: Asked) -> Timeline:
    """Let it be answered, rightly; returns its last timeline."""
    world.submit(asked)
    world.finish(seed=asked.request.sampling.seed)
    assert asked.got == asked.expected
    return asked.timelines[-1]


def token_bytes(world: World) -> int:
    """Of all ranks of the decode node."""
    layout = world.decode.ranks.layout
    return layout.token_bytes * layout.tp_size


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ((4, 1), (4, 1)),
        ((4, 2), (4, 1)),
        ((4, 1), (4, 2)),
        ((4, 2), (4, 4)),
        ((8, 1), (4, 1)),
        ((4, 1), (8, 1)),
        ((4, 2), (6, 1)),
        ((6, 1), (4, 2)),
        ((5, 1), (3, 1)),
        ((1, 1), (4, 1)),
    ],
)
def test_a_second_prompt_is_computed_and_moved_only_where_it_is_not_known(start, decode, prefill):
    world = start(decode=(*decode, True), prefill=(*prefill, True))
    cold = answer(world, same(world, 1))
    warm = answer(world, same(world, 2))
    held = (PROMPT_LEN - 1) // decode[0] * decode[0]
    computed = world.prefills["p0"].node.scheduler.ledger
    assert (cold.cached_tokens, cold.kv_bytes) == (0, PROMPT_LEN * token_bytes(world))
    assert warm.kv_bytes == (PROMPT_LEN - held) * token_bytes(world)
    assert warm.cached_tokens == (PROMPT_LEN - 1) // prefill[0] * prefill[0]
    assert computed.num_hit_tokens == warm.cached_tokens
    assert computed.num_queried_tokens == 2 * PROMPT_LEN


@pytest.mark.parametrize("caching", ["decode", "prefill", "neither"])
def test_a_node_that_does_not_cache_gets_or_computes_all_of_it(start, caching):
    world = start(decode=(4, 1, caching == "decode"), prefill=(4, 1, caching == "prefill"))
    answer(world, same(world, 1))
    warm = answer(world, same(world, 2))
    num_moved = 1 if caching == "decode" else PROMPT_LEN
    assert warm.kv_bytes == num_moved * token_bytes(world)
    assert warm.cached_tokens == (20 if caching == "prefill" else 0)


@pytest.mark.parametrize("prefill_nodes", [("p0",), ()])
def test_a_prompt_whose_logprobs_are_wanted_is_computed_from_its_beginning(world, prefill_nodes):
    answer(world, same(world, 1, prefill_nodes=prefill_nodes))
    asked = same(world, 2, prefill_nodes=prefill_nodes, prompt_logprobs=2)
    assert answer(world, asked).cached_tokens == 0
    assert asked.num_scored == PROMPT_LEN
    assert answer(world, same(world, 3, prefill_nodes=prefill_nodes)).cached_tokens == 20


def test_a_prompt_that_is_prefilled_here_profits_from_one_that_came_by_handoff(world):
    answer(world, same(world, 1))
    local = answer(world, same(world, 2, prefill_nodes=()))
    assert (local.route, local.kv_bytes, local.cached_tokens) == (RouteTaken.LOCAL, 0, 20)
    (chunk,) = [stage for stage in local.stages if stage.name == "prefill"]
    assert chunk.node == "decode-0"


def test_a_handoff_profits_from_a_prompt_that_was_prefilled_here(world):
    answer(world, same(world, 1, prefill_nodes=()))
    remote = answer(world, same(world, 2))
    assert remote.kv_bytes == token_bytes(world)
    assert remote.cached_tokens == 0, "the prefill node had to compute all of it"


def test_the_next_turn_of_a_conversation_finds_the_answer_too(world):
    first = same(world, 1, min_tokens=9)
    answer(world, first)
    assert len(first.tokens) == 30
    turn = answer(world, ask(world.model, 2, prompt_len=40, max_tokens=4, after=first.tokens))
    # The last token of an answer is never computed: 29 tokens of KV are there, 7 full blocks.
    assert turn.cached_tokens == 28


def test_choices_share_one_prompt_and_it_is_counted_once(world):
    answer(world, same(world, 1))
    warm = answer(world, same(world, 2, num_choices=3))
    assert (warm.cached_tokens, warm.kv_bytes) == (20, token_bytes(world))


def test_requests_of_different_salts_share_nothing(world):
    answer(world, same(world, 1, cache_salt=b"mine"))
    for number, salt in enumerate([b"", b"yours"], 2):
        other = answer(world, same(world, number, cache_salt=salt))
        assert (other.cached_tokens, other.kv_bytes) == (0, PROMPT_LEN * token_bytes(world))
    again = answer(world, same(world, 4, cache_salt=b"mine"))
    assert again.cached_tokens == 20


def test_a_retry_counts_as_cached_what_of_the_prompt_alone_was_there(world):
    first = same(world, 1, min_tokens=9)
    answer(world, first)
    retry = same(world, 1, min_tokens=9, num_had=6)
    assert len(retry.request.token_ids) == 27
    timeline = answer(world, retry)
    assert timeline.cached_tokens == 20, "what p0 had; it never saw the answer"
    local = answer(world, same(world, 1, min_tokens=9, num_had=7, prefill_nodes=()))
    assert local.cached_tokens == PROMPT_LEN


def test_where_the_first_prefill_fails_the_one_that_brings_the_tokens_counts(world):
    answer(world, same(world, 1, prefill_nodes=("p1",)))
    asked = same(world, 2, prefill_nodes=("p0", "p1"))
    world.submit(asked)
    world.bring_all_but("p0 steps")
    world.kill_prefill("p0")
    world.finish()
    assert asked.got == asked.expected
    assert asked.timelines[-1].cached_tokens == 20


# What is under way when a request is given up: nothing that came in part is known afterwards.
STAGES = {
    "computed, nothing sent": ("over",),
    "asked": ("up",),
    "queued there": ("p0 steps",),
}


@pytest.mark.parametrize("held", STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("by", ["abort", "router", "wire", "KV", "node"])
def test_what_ends_midway_leaves_nothing_known_that_is_not_there(world, held, by):
    asked = same(world, 1)
    world.submit(asked)
    world.bring_all_but(*held)
    match by:
        case "abort":
            world.abort(asked)
        case "router":
            world.lose_router(0)
        case "wire":
            world.cut_wire("p0")
        case "KV":
            world.cut_kv("p0")
        case "node":
            world.kill_prefill("p0")
    world.finish()
    decode = world.decode.node.scheduler.ledger
    if by in ("abort", "router"):
        assert decode.pool.cache.num_named == 0
    world.connect_all()
    again = answer(world, same(world, 2))
    held_tokens = decode.num_hit_tokens
    assert again.kv_bytes == (PROMPT_LEN - held_tokens) * token_bytes(world)


def test_shared_blocks_outlive_the_request_that_filled_them(world):
    """While a second one moves or decodes, the first ends, and others want its blocks."""
    first, second = same(world, 1), same(world, 2)
    world.submit(first)
    world.bring_all_but("decode-0 steps")
    world.submit(second)
    world.bring_all_but("decode-0 steps", "over")
    world.abort(first)
    others = [ask(world.model, n, prompt_len=30, max_tokens=8) for n in range(3, 8)]
    for other in others:
        world.submit(other)
    world.finish()
    assert all(asked.got == asked.expected for asked in (second, *others))


def test_a_cache_that_is_too_small_gives_up_what_is_known_and_everything_is_answered(start):
    world = start(decode_blocks=12)
    for number in range(1, 7):
        alike = same(world, number, num_alike=8)
        assert answer(world, alike).cached_tokens == (8 if number > 1 else 0)
    pool = world.decode.node.scheduler.ledger.pool
    assert pool.num_free == 12
    assert pool.cache.num_named == pool.cache.num_idle <= 12


def test_the_status_counts_what_was_looked_for_and_what_was_found(world):
    for number in range(1, 4):
        answer(world, same(world, number))
    status = world.decode.node.status([])
    assert status.prefix_cache_queries == 3 * PROMPT_LEN
    assert status.prefix_cache_hits == 2 * 20
    assert status.free_blocks == status.total_blocks
