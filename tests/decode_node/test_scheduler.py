"""The decode scheduler's promises, one by one. ``test_scheduler_random.py`` mixes them all."""

import pytest

from tests.decode_node.world import make_world

# ---- admission ------------------------------------------------------------------------------


def test_blocks_for_prompt_and_head_room_are_reserved_before_any_prefill():
    world = make_world(10)
    asked = world.ask(9, 20, route="remote")
    assert [leg.sequence.num_prompt for leg in world.legs] == [9]
    assert asked.num_blocks == 4  # 9 + 4 tokens


def test_each_choice_gets_its_own_head_room():
    world = make_world(10)
    assert world.ask(9, 20, num_choices=3, route="remote").num_blocks == 6  # 9 + 3 × 4 tokens


def test_head_room_is_never_more_than_the_sequence_can_use():
    assert make_world(10, headroom_tokens=64).ask(9, 2, route="remote").num_blocks == 3


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
    assert [a.num_blocks > 0 for a in (running, huge, early, late)] == [True, False, True, False]
    world.abort(running)
    world.abort(early)
    for leg in list(world.legs):
        world.drain(leg)
    world.scheduler.admit()
    world.act()
    assert [a.num_blocks > 0 for a in (huge, late)] == [True, True]
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
    assert all(asked.num_blocks for asked in waiting)


def test_sequences_at_once_are_bounded_with_every_choice_counted():
    world = make_world(max_num_seqs=4)
    world.ask(4, 4, num_choices=2, route="remote")
    world.ask(4, 4, route="remote")
    world.ask(4, 4, num_choices=2, route="remote")
    assert len(world.legs) == 2
    world.ask(4, 4, route="remote")
    assert len(world.legs) == 3
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
