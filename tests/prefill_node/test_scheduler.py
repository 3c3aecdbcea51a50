"""The prefill scheduler's promises, one by one. ``test_scheduler_random.py`` mixes them all."""

import pytest

from pdserve.engine.sequence import Sequence
from tests.prefill_node.world import Prefill, World

SHORT, MEDIUM, LONG = 4, 16, 60  # one prompt length of each class


def computed(world: World) -> list[list[tuple[int, int]]]:
    """(start, length) of the chunks of each step."""
    return [[(chunk.start, chunk.length) for chunk in batch.chunks] for batch in world.batches]


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.key.request_id for sequence in sequences]


# ---- chunks ---------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_as_large_as_a_step_allows():
    world = World(num_blocks=20, max_num_batched_tokens=16)
    prefill = world.ask(40)
    world.finish()
    assert computed(world) == [[(0, 16)], [(16, 16)], [(32, 8)]]
    assert prefill.got == prefill.expected


def test_short_prompts_finish_in_one_step_and_a_long_one_fills_the_rest():
    world = World(num_blocks=40, max_num_batched_tokens=16)
    for length in (LONG, SHORT, SHORT):
        world.ask(length)
    world.step()
    assert computed(world) == [[(0, 4), (0, 4), (0, 8)]]
    world.finish()


def test_each_choice_gets_its_first_token_from_one_prefill():
    world = World(num_blocks=20)
    prefill = world.ask(10, num_choices=3)
    world.finish()
    assert prefill.got is not None
    assert len(prefill.got) == 3
    assert sum(batch.num_tokens for batch in world.batches) == 10


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_several_steps_in_flight_change_nothing_but_time(depth: int):
    world = World(num_blocks=40, depth=depth)
    for length in (40, 3, 25, 60):
        world.ask(length)
    world.plan()
    assert world.executor.num_in_flight == depth
    world.finish()


# ---- who starts -----------------------------------------------------------------------------


def test_a_prompt_starts_only_when_blocks_for_the_whole_of_it_are_free():
    world = World(num_blocks=20)
    first = world.ask(48)
    second = world.ask(40)
    for _ in range(5):
        world.step()
    assert first.is_computed
    assert not second.sequence.blocks
    world.end(first)
    world.step()
    assert len(second.sequence.blocks) == 10
    world.finish()


def test_a_prompt_that_could_never_fit_is_told_apart():
    scheduler = World(num_blocks=4).scheduler
    assert scheduler.fits(16)
    assert not scheduler.fits(17)


def test_prompts_in_work_are_bounded_by_the_slots():
    world = World(num_blocks=40, num_slots=2)
    for _ in range(3):
        world.ask(20)
    world.plan()
    assert world.scheduler.num_running == 2
    assert world.scheduler.num_waiting == 1
    world.finish()


# ---- order and ageing -----------------------------------------------------------------------


def test_within_a_class_the_first_to_come_is_the_first_to_be_computed():
    world = World(num_blocks=100)
    for _ in range(5):
        world.ask(MEDIUM)
        world.clock.advance(0.01)
    world.finish()
    assert names(world.ended) == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize(
    ("waited_s", "order"), [(0.5, ["r1", "r0"]), (1.5, ["r1", "r0"]), (2.5, ["r0", "r1"])]
)
def test_a_short_prompt_passes_a_long_one_that_came_less_than_its_classes_earlier(
    waited_s: float, order: list[str]
):
    world = World(num_blocks=100)
    world.ask(LONG)
    world.step()
    world.clock.advance(waited_s)  # the long one is two classes above: 2 s
    world.ask(SHORT)
    world.ask(MEDIUM)
    world.finish()
    ended = names(world.ended)
    assert sorted(["r0", "r1"], key=ended.index) == order


def test_the_lane_that_came_with_a_prompt_counts_and_not_its_length():
    world = World(num_blocks=100)
    world.ask(MEDIUM, lane=2)
    world.ask(LONG, lane=0)
    world.ask(MEDIUM, lane=1)
    world.finish()
    assert names(world.ended) == ["r1", "r2", "r0"]


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    world = World(num_blocks=100, max_num_batched_tokens=8)
    long = world.ask(LONG)
    num_turns = 0
    while not long.is_computed and num_turns < 80:
        num_turns += 1
        world.ask(SHORT)
        world.ask(SHORT)
        world.step()
        for prefill in [p for p in world.prefills if p.is_computed and p is not long]:
            world.end(prefill)
        world.clock.advance(0.1)
    assert 20 <= num_turns < 40  # two seconds of being passed, then 60 tokens at 8 a step
    world.finish()


def fill(world: World, num_prompts: int) -> list[Prefill]:
    """Prompts of 16 tokens that are computed and still in transfer."""
    prefills = [world.ask(MEDIUM) for _ in range(num_prompts)]
    while world.step():
        pass
    assert all(prefill.is_computed for prefill in prefills)
    return prefills


def test_small_prompts_pass_one_that_does_not_fit_only_until_it_has_waited_too_long():
    world = World(num_blocks=20)
    (holder,) = fill(world, 1)
    huge = world.ask(72)  # 18 of the 16 free blocks; its place is 2 s after its arrival
    world.clock.advance(2.9)
    early = world.ask(SHORT)
    world.step()
    assert early.is_computed
    world.clock.advance(0.2)
    late = world.ask(SHORT)
    world.step()
    assert not late.sequence.blocks
    world.end(early)
    world.end(holder)
    world.step()
    assert huge.sequence.blocks
    world.finish()


def test_a_huge_prompt_starts_although_small_ones_keep_coming():
    world = World(num_blocks=20, max_num_batched_tokens=32)
    small = fill(world, 4)
    huge = world.ask(72)
    num_turns = 0
    while not huge.sequence.blocks and num_turns < 60:
        num_turns += 1
        small.append(world.ask(MEDIUM))
        world.step()
        if small[0].is_computed:  # one handoff ends each turn
            world.end(small.pop(0))
        world.clock.advance(0.2)
    assert num_turns < 30
    world.finish()


def test_prompts_that_have_waited_too_long_start_together_when_all_fit():
    world = World(num_blocks=20)
    holders = fill(world, 5)
    waiting = [world.ask(SHORT) for _ in range(5)]
    world.clock.advance(10)
    for prefill in holders:
        world.end(prefill)
    world.plan()
    assert all(prefill.sequence.blocks for prefill in waiting)
    world.finish()


# ---- blocks and the handoff -----------------------------------------------------------------


def test_blocks_stay_with_a_computed_prompt_until_its_handoff_is_over():
    world = World(num_blocks=20)
    (prefill,) = fill(world, 1)
    assert world.ledger.pool.num_free == 16
    assert world.ledger.num_free_slots == world.num_slots
    world.end(prefill)
    assert world.ledger.pool.num_free == 20


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_gives_everything_back_once_no_step_and_no_handoff_needs_it(
    num_steps: int, depth: int
):
    world = World(num_blocks=12, depth=depth, max_num_batched_tokens=12)
    prefill = world.ask(40)
    for _ in range(num_steps):
        world.step()
    world.plan()
    world.abort(prefill)
    held = len(prefill.sequence.blocks)
    assert held == 10
    world.step()
    assert len(prefill.sequence.blocks) == held  # the handoff may still read them
    in_flight = world.executor.num_in_flight
    world.end(prefill)
    assert bool(world.ledger.num_draining_blocks) == bool(in_flight)
    other = world.ask(40)
    world.finish()
    assert other.got == other.expected


def test_a_waiting_prompt_that_is_aborted_never_starts():
    world = World(num_blocks=12)
    (holder,) = fill(world, 1)
    prefill = world.ask(40)
    world.plan()
    world.abort(prefill)
    world.end(prefill)
    world.end(holder)
    assert not world.plan()
    assert world.scheduler.num_queued_tokens == 0


def test_tokens_that_no_step_has_been_planned_for_are_counted():
    world = World(num_blocks=20, max_num_batched_tokens=16)
    world.ask(40)
    world.ask(60)
    assert world.scheduler.num_queued_tokens == 100
    world.step()
    assert world.scheduler.num_queued_tokens == 84
    world.abort(world.prefills[1])
    assert world.scheduler.num_queued_tokens == 24
