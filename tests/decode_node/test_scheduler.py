"""The decode scheduler's promises, one by one. ``test_scheduler_random.py`` mixes them all."""

from collections.abc import Callable

import pytest

from decode_node.scheduler import DecodeLimits
from pdserve.engine.batch import BlockCopy
from tests.decode_node.world import Asked, World

LIMITS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "local_prefill_tokens": 8,
    "fallback_chunk": 4,
    "headroom_tokens": 4,
    "overtake_s": 1.0,
}


def make_world(num_blocks: int = 100, *, depth: int = 2, **limits) -> World:
    return World(DecodeLimits(**(LIMITS | limits)), num_blocks=num_blocks, depth=depth)


def blocks_of(asked: Asked) -> int:
    return sum(len(sequence.blocks) for sequence in set(asked.living.values()))


def prompt_lengths(world: World, asked: Asked) -> list[int]:
    """Prompt tokens of a request in each step that has some; its slot is its own in these tests."""
    (sequence,) = set(asked.living.values())
    chunks = [chunk for batch in world.batches for chunk in batch.chunks]
    return [c.length for c in chunks if c.slot == sequence.slot and c.start < sequence.num_prompt]


def step_until(world: World, done: Callable[[], object]) -> None:
    for _ in range(100):
        if done():
            return
        world.step()
        world.clock.advance(0.001)
    raise AssertionError("not within 100 steps")


def copies_of(world: World) -> list[BlockCopy]:
    return [copy for batch in world.batches for copy in batch.copies]


# ---- admission ------------------------------------------------------------------------------


def test_blocks_for_prompt_and_head_room_are_reserved_before_any_prefill():
    world = make_world(10)
    asked = world.ask(9, 20, route="remote")
    assert [leg.sequence.num_prompt for leg in world.legs] == [9]
    assert blocks_of(asked) == 4  # 9 + 4 tokens


def test_each_choice_gets_its_own_head_room():
    world = make_world(10)
    assert blocks_of(world.ask(9, 20, num_choices=3, route="remote")) == 6  # 9 + 3 × 4 tokens


def test_head_room_is_never_more_than_the_sequence_can_use():
    assert blocks_of(make_world(10, headroom_tokens=64).ask(9, 2, route="remote")) == 3


def test_what_does_not_fit_now_waits_and_costs_no_prefill():
    world = make_world(6)
    world.ask(9, 4, route="remote")
    world.ask(9, 4, route="remote")
    assert len(world.legs) == 1
    assert world.scheduler.num_waiting == 2


def test_nothing_is_admitted_into_the_block_that_a_running_sequence_may_need_next():
    world = make_world(4, headroom_tokens=0, depth=1)
    world.ask(4, 5)
    world.step()
    world.ask(12, 1, route="remote")
    assert world.ledger.pool.num_free == 3
    assert not world.legs
    world.finish()
    assert not world.replaced


def test_what_could_never_fit_is_not_taken():
    world = make_world(4, max_num_seqs=2)
    with pytest.raises(AssertionError):
        world.ask(10, 7)
    with pytest.raises(AssertionError):
        world.ask(2, 2, num_choices=3)


def test_small_requests_pass_a_huge_one_only_until_it_has_waited_long_enough():
    world = make_world(20)
    running = world.ask(36, 40, route="remote")
    huge = world.ask(60, 4, route="remote")
    world.clock.advance(0.5)
    early = world.ask(4, 4, route="remote")
    world.clock.advance(0.6)
    late = world.ask(4, 4, route="remote")
    assert [blocks_of(a) > 0 for a in (running, huge, early, late)] == [True, False, True, False]
    world.abort(running)
    world.abort(early)
    for leg in list(world.legs):
        world.drain(leg)
    world.scheduler.admit()
    world.act()
    assert [blocks_of(a) > 0 for a in (huge, late)] == [True, True]
    world.finish()


def test_a_huge_request_is_not_starved_by_a_stream_of_small_ones():
    world = make_world(12, overtake_s=1.0)
    for _ in range(3):
        world.ask(8, 4)
    huge = world.ask(40, 4)
    for _ in range(60):
        world.ask(8, 4)
        world.step()
        world.clock.advance(0.1)
    assert world.scheduler.num_waiting > 0
    assert 0 in huge.ended
    world.finish()


def test_requests_that_have_waited_long_start_together_when_all_fit():
    world = make_world(20, max_num_seqs=8)
    blocker = world.ask(72, 4, route="remote")
    waiting = [world.ask(8, 4, route="remote") for _ in range(4)]
    world.clock.advance(10)
    world.abort(blocker)
    world.drain(world.legs[0])
    world.scheduler.admit()
    world.act()
    assert all(blocks_of(asked) for asked in waiting)


def test_sequences_at_once_are_bounded_with_every_choice_counted():
    world = make_world(max_num_seqs=4)
    world.ask(4, 4, num_choices=2, route="remote")
    world.ask(4, 4, route="remote")
    world.ask(4, 4, num_choices=2, route="remote")
    assert len(world.legs) == 2
    world.ask(4, 4, route="remote")
    assert len(world.legs) == 3
    world.finish()


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
    world.clock.advance(1)
    younger = world.ask(6, 4, route="fallback", admit=False)
    older = world.ask(6, 4, route="fallback", admit=False)
    for sequence in older.living.values():
        sequence.arrived_s = 0.0
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


# ---- prefill elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize("kv_first", [True, False])
def test_a_sequence_decodes_once_its_first_token_and_all_its_kv_are_there(kv_first: bool):
    world = make_world()
    asked = world.ask(9, 5, route="remote")
    (leg,) = world.legs
    world.push(leg, 5)
    if kv_first:
        world.push(leg, 4)
    assert not world.step()
    world.bring_first_tokens(leg)
    if not kv_first:
        assert asked.got[0] == asked.expected[0][:1]  # the client need not wait for the KV
        assert not world.step()
        world.push(leg, 4)
    world.finish()
    assert [c.start for b in world.batches for c in b.chunks] == [9, 10, 11, 12]


def test_a_request_for_one_token_ends_with_its_first_and_frees_its_blocks_after_the_drain():
    world = make_world(10)
    asked = world.ask(9, 1, route="remote")
    (leg,) = world.legs
    world.bring_first_tokens(leg)
    assert asked.ended
    assert world.ledger.pool.num_free < 10
    world.drain(leg)
    world.finish()


def test_a_failed_handoff_goes_on_with_the_tokens_that_the_client_has():
    world = make_world()
    asked = world.ask(9, 5, route="remote")
    (leg,) = world.legs
    world.bring_first_tokens(leg)
    world.fail(leg)
    (again,) = asked.living.values()
    assert again.num_prompt == 10
    assert again.prompt_len == 9
    world.finish()


def test_a_failed_handoff_of_several_choices_goes_on_choice_by_choice():
    world = make_world()
    asked = world.ask(9, 5, num_choices=3, route="remote")
    (leg,) = world.legs
    world.bring_first_tokens(leg)
    world.fail(leg)
    assert [s.choices for s in asked.living.values()] == [(0,), (1,), (2,)]
    world.finish()


# ---- several choices ------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["local", "remote"])
def test_choices_share_the_full_blocks_of_their_prompt_and_copy_the_last(route: str):
    world = make_world(max_num_seqs=4)
    asked = world.ask(10, 8, num_choices=3, route=route)
    for leg in list(world.legs):
        world.bring_first_tokens(leg)
        world.push(leg, 10)
    step_until(world, lambda: copies_of(world))
    tables = [sequence.blocks for sequence in asked.living.values()]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert len(copies_of(world)) == 3
    world.finish()


def test_choices_of_a_prompt_that_ends_on_a_block_border_copy_nothing():
    world = make_world()
    world.ask(8, 4, num_choices=2)
    world.finish()
    assert not copies_of(world)


def test_choices_part_in_the_head_room_even_when_nothing_else_is_free():
    world = make_world(7)
    world.ask(10, 6, num_choices=2)  # 3 blocks of prompt, 2 of head-room
    world.ask(4, 1, route="remote")  # the last two
    assert world.ledger.pool.num_free == 0
    step_until(world, lambda: copies_of(world))
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


# ---- want of blocks -------------------------------------------------------------------------


def test_handoffs_that_have_not_started_are_withdrawn_before_anything_is_preempted():
    world = make_world(9, headroom_tokens=0, depth=1)
    running = world.ask(4, 20)
    world.step()
    older, younger = (world.ask(8, 4, route="remote") for _ in range(2))
    world.ask(4, 3, route="remote")
    started = world.legs[-1]
    world.bring_first_tokens(started)
    step_until(world, lambda: world.replaced)
    assert world.replaced[0].key == younger.key
    assert world.scheduler.num_preemptions == 0
    assert blocks_of(older) == 2
    assert running.living
    world.finish()


def test_the_youngest_running_sequence_is_preempted_and_loses_no_token():
    world = make_world(8, headroom_tokens=0, depth=1)
    oldest = world.ask(8, 20)
    world.clock.advance(0.1)
    middle = world.ask(4, 20)
    world.clock.advance(0.1)
    youngest = world.ask(4, 20)
    step_until(world, lambda: world.replaced)
    assert world.replaced[0].key == youngest.key
    (again,) = youngest.living.values()
    assert again.num_prompt == 4 + len(youngest.got[0])
    assert again.arrived_s == 0.2
    assert world.scheduler.num_preemptions == 1
    assert blocks_of(oldest)
    assert blocks_of(middle)
    world.finish()


def test_a_sequence_waits_for_blocks_that_are_about_to_come_back_instead_of_preempting():
    world = make_world(8, headroom_tokens=0, depth=1)
    world.ask(4, 20)
    world.step()
    leaving = world.ask(24, 4, route="remote")
    (leg,) = world.legs
    world.abort(leaving)
    for _ in range(6):
        world.step()
    assert len(world.batches[-1].chunks) == 1
    assert not world.replaced
    world.drain(leg)
    world.finish()
    assert not world.replaced


def test_an_admission_that_the_next_plan_withdraws_is_not_announced():
    world = make_world(4, headroom_tokens=0, depth=2, local_prefill_tokens=8)
    world.ask(8, 4)  # needs another block for its first decode step
    late = world.ask(8, 4, route="remote", admit=False)
    world.plan()
    assert world.replaced
    assert not world.legs
    assert late.living[0].blocks == []
    world.finish()


# ---- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_is_spent_beyond_the_length_limit(depth: int):
    world = make_world(depth=depth)
    world.ask(4, 6)
    world.finish()
    assert len(world.batches) == 6


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_was_planned_beyond_an_end_token_is_dropped(depth: int):
    world = make_world(depth=depth)
    asked = world.ask(4, 60, ends=tuple(range(0, 61, 5)))
    world.finish()
    num_tokens = len(asked.got[0])
    assert num_tokens < 60
    assert num_tokens <= len(world.batches) <= num_tokens + depth - 1


STAGES = ["waiting", "reserved", "some KV", "first token", "all KV", "local", "running", "forked"]


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_gives_everything_back_whatever_stage_it_meets(stage: str, num_choices: int):
    world = make_world(12)
    blocker = world.ask(40, 4, route="remote") if stage == "waiting" else None
    route = "local" if stage in {"local", "running", "forked"} else "remote"
    asked = world.ask(10, 12, route=route, num_choices=num_choices)
    if stage in {"some KV", "first token"}:
        world.push(world.legs[-1], 6)
    if stage == "first token":
        world.bring_first_tokens(world.legs[-1])
    if stage == "all KV":
        world.push(world.legs[-1], 10)
    world.executor.run_one()
    for _ in range({"local": 1, "running": 4, "forked": 2}.get(stage, 0)):
        world.step()
    world.plan()
    world.abort(asked)
    other = world.ask(10, 12)  # takes the blocks as soon as they may be taken
    if blocker is not None:
        world.abort(blocker)
    world.finish()
    assert len(other.got[0]) == 12
