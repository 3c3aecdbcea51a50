"""Prompts that a decode node computes itself, and several choices of one prompt."""

import pytest

from tests.decode_node.asked import Asked
from tests.decode_node.world import MAX_FAILURES, World, make_world


def prompt_lengths(world: World, asked: Asked) -> list[int]:
    """Prompt tokens of a request in each step that has some; its slot is its own in these tests."""
    (sequence,) = set(asked.living.values())
    chunks = [chunk for batch in world.batches for chunk in batch.chunks]
    return [c.length for c in chunks if c.slot == sequence.slot and c.start < sequence.num_prompt]


# ---- local prefill --------------------------------------------------------------------------


def test_routed_prompts_share_the_local_budget_of_a_step():
    world = make_world(local_prefill_tokens=8)
    asked = [world.ask(length, 4) for length in (3, 10, 6)]
    world.step()
    world.step()
    world.step()
    assert [prompt_lengths(world, a) for a in asked] == [[3], [5, 5], [3, 3]]
    world.finish()


def test_fallbacks_are_computed_one_at_a_time_oldest_first():
    world = make_world(fallback_chunk=4)
    older = world.ask(6, 4, route="remote")
    world.clock.advance(0.1)
    younger = world.ask(6, 4, route="fallback")
    for _ in range(MAX_FAILURES):
        world.fail(world.legs[0])
        world.drain(world.legs[0])
        world.scheduler.admit()
        world.act()
    for _ in range(4):
        world.step()
    assert [prompt_lengths(world, a) for a in (older, younger)] == [[4, 2], [4, 2]]
    slots = [chunk.slot for batch in world.batches[:2] for chunk in batch.chunks]
    (sequence,) = older.living.values()
    assert set(slots) == {sequence.slot}
    world.finish()


def test_without_a_local_budget_routed_prompts_are_computed_as_fallbacks():
    world = make_world(local_prefill_tokens=0, fallback_chunk=4)
    asked = [world.ask(6, 4), world.ask(6, 4)]
    for _ in range(4):
        world.step()
    assert [prompt_lengths(world, a) for a in asked] == [[4, 2], [4, 2]]
    world.finish()


def test_a_fallback_is_not_starved_by_a_stream_of_routed_prompts():
    world = make_world(max_num_batched_tokens=8, local_prefill_tokens=8, fallback_chunk=4)
    fallback = world.ask(20, 2, route="fallback")
    for _ in range(30):
        world.clock.advance(0.01)
        world.ask(8, 1)
        world.step()
    assert fallback.ended
    world.finish()


def test_running_sequences_decode_beside_a_local_prompt_in_every_step():
    world = make_world(depth=1, max_num_batched_tokens=4, local_prefill_tokens=4)
    running = world.ask(4, 20)
    world.step()
    world.ask(30, 2)
    for expected in range(2, 10):
        world.step()
        assert len(running.got[0]) == expected
    world.finish()


# ---- several choices ------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["local", "remote"])
def test_choices_share_the_full_blocks_of_their_prompt_and_copy_the_last(route: str):
    world = make_world(max_num_seqs=4)
    asked = world.ask(10, 8, num_choices=3, route=route)
    for leg in list(world.legs):
        world.bring_first_tokens(leg)
        world.push(leg, 10)
    world.step_until(lambda: world.copies)
    tables = [sequence.blocks for sequence in asked.living.values()]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert len(world.copies) == 3
    world.finish()


def test_choices_of_a_prompt_that_ends_on_a_block_border_copy_nothing():
    world = make_world()
    world.ask(8, 4, num_choices=2)
    world.finish()
    assert not world.copies


def test_choices_part_in_the_head_room_even_when_nothing_else_is_free():
    world = make_world(7)
    world.ask(10, 6, num_choices=2)  # 3 blocks of prompt, 2 of head-room
    world.ask(4, 1, route="remote")  # the last two
    assert world.ledger.pool.num_free == 0
    world.step_until(lambda: world.copies)
    assert not world.replaced
    world.finish()


def test_choices_for_whose_copies_no_block_is_free_are_computed_again():
    world = make_world(4, headroom_tokens=0)
    world.ask(10, 4, num_choices=2)
    world.ask(4, 1, route="remote")
    for _ in range(3):
        world.step()
    assert [len(sequence.choices) for sequence in world.replaced] == [1, 1]
    world.finish()


def test_choices_of_one_request_do_not_preempt_each_other_for_ever():
    world = make_world(
        42, max_num_seqs=4, max_num_batched_tokens=3, fallback_chunk=2, local_prefill_tokens=0
    )
    world = World(world.limits, num_blocks=42, block_size=1, depth=2)
    world.ask(13, 20, num_choices=2)
    world.ask(7, 19, num_choices=3)
    world.finish()
    assert world.replaced
