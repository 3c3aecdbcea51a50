"""Prompts that begin like earlier ones: what a prefill node computes of them, and when it tells."""

import pytest

from tests.prefill_node.world import Prefill, World


def starts(world: World) -> list[list[int]]:
    """Where the chunks of each step begin."""
    return [[chunk.start for chunk in batch.chunks] for batch in world.batches]


def alike(world: World, prompt_len: int = 40, cache_salt: bytes = b"") -> Prefill:
    return world.ask(prompt_len, num_alike=prompt_len, cache_salt=cache_salt)


def test_only_what_is_not_cached_is_computed():
    world = World(num_blocks=40)
    alike(world, 40)
    world.finish()
    world.batches.clear()
    longer = world.ask(60, num_alike=30)
    world.finish()
    assert starts(world) == [[28], [44]]
    assert longer.sequence.num_cached == 28


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 39, 40, 41])
def test_the_last_token_of_a_prompt_is_always_computed(prompt_len: int):
    world = World(num_blocks=40)
    for _ in range(2):
        alike(world, prompt_len)
        world.finish()
    last = world.batches[-1].chunks[-1]
    assert last.start == (prompt_len - 1) // 4 * 4
    assert last.length == prompt_len - last.start


def test_what_is_cached_is_told_before_anything_is_computed():
    world = World(num_blocks=40)
    alike(world)
    world.finish()
    again = alike(world)
    world.plan()
    assert (again.num_computed, again.got) == (36, None)
    world.finish()


def test_prompts_that_are_computed_at_the_same_time_share_nothing():
    world = World(num_blocks=40, max_num_batched_tokens=80)
    prefills = [alike(world), alike(world)]
    world.plan()
    assert starts(world) == [[0, 0]]
    world.finish()
    assert [prefill.sequence.num_cached for prefill in prefills] == [0, 0]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_of_an_aborted_prompt_what_steps_have_finished_is_known(num_steps: int):
    world = World(num_blocks=40)
    first = alike(world)
    for _ in range(num_steps):
        world.step()
    world.abort(first)
    world.end(first)
    again = alike(world)
    world.finish()
    assert again.sequence.num_cached == 16 * num_steps


def test_steps_that_finish_after_an_abort_are_known_then_and_not_before():
    world = World(num_blocks=40, depth=2)
    first = alike(world)
    world.plan()
    world.abort(first)
    world.end(first)
    cache = world.ledger.pool.cache
    known = [cache.num_named]
    for _ in range(2):
        world.apply()
        known.append(cache.num_named)
    assert known == [0, 4, 8]
    assert world.ledger.is_empty


def test_a_prompt_of_another_salt_is_another_prompt():
    world = World(num_blocks=40)
    alike(world, cache_salt=b"mine")
    world.finish()
    for salt, num_cached in ((b"yours", 0), (b"mine", 36)):
        prefill = alike(world, cache_salt=salt)
        world.finish()
        assert prefill.sequence.num_cached == num_cached


def test_blocks_of_a_handoff_that_still_reads_them_are_shared_and_leave_room():
    world = World(num_blocks=8)
    first = alike(world, 24)
    while not first.is_computed:
        world.step()
    again = alike(world, 24)  # 6 blocks, 2 are free
    world.step()
    assert again.is_computed
    assert again.sequence.blocks[:5] == first.sequence.blocks[:5]
    world.end(first)
    world.finish()


def test_without_room_the_prefix_that_was_used_least_recently_is_given_up():
    world = World(num_blocks=20)
    for num_alike in (40, 0):
        world.ask(40, num_alike=num_alike)
        world.finish()
    world.ask(36)
    world.finish()
    again = alike(world)
    world.finish()
    assert again.sequence.num_cached == 4  # nine of its ten blocks were the longest idle
