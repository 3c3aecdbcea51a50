"""What a decode node gives up, in which order, when blocks run out."""

from tests.decode_node.world import make_world


def test_handoffs_that_have_not_started_are_withdrawn_before_anything_is_preempted():
    world = make_world(9, headroom_tokens=0, depth=1)
    running = world.ask(4, 20)
    world.step()
    older, younger = (world.ask(8, 4, route="remote") for _ in range(2))
    world.ask(4, 3, route="remote")
    started = world.legs[-1]
    world.bring_first_tokens(started)
    world.step_until(lambda: world.replaced)
    assert world.replaced[0].key == younger.key
    assert world.scheduler.num_preemptions == 0
    assert older.num_blocks == 2
    assert running.living
    world.finish()


def test_the_youngest_running_sequence_is_preempted_and_loses_no_token():
    world = make_world(8, headroom_tokens=0, depth=1)
    oldest = world.ask(8, 20)
    world.clock.advance(0.1)
    middle = world.ask(4, 20)
    world.clock.advance(0.1)
    youngest = world.ask(4, 20)
    world.step_until(lambda: world.replaced)
    assert world.replaced[0].key == youngest.key
    (again,) = youngest.living.values()
    assert again.num_prompt == 4 + len(youngest.got[0])
    assert again.arrived_s == 0.2
    assert world.scheduler.num_preemptions == 1
    assert oldest.num_blocks
    assert middle.num_blocks
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
