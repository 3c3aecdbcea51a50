"""Prompts that begin like earlier ones on a decode node: by handoff, locally, preempted."""

import pytest

from tests.decode_node.asked import Asked
from tests.decode_node.world import World, make_world


def alike(world: World, max_tokens: int = 4, **options) -> Asked:
    """A request of 21 tokens, all of them those of every such request."""
    return world.ask(21, max_tokens, num_alike=21, **options)


def starts(world: World) -> list[int]:
    """Where the prompt chunks of all steps so far begin."""
    chunks = [chunk for batch in world.batches for chunk in batch.chunks]
    return [chunk.start for chunk in chunks if chunk.start < 21]


def test_a_local_prompt_is_computed_from_where_the_cache_ends():
    world = make_world()
    alike(world)
    world.finish()
    world.batches.clear()
    alike(world)
    world.finish()
    assert starts(world) == [20]


@pytest.mark.parametrize("first", ["remote", "local"])
def test_of_a_remote_prompt_only_the_rest_has_to_come(first: str):
    world = make_world()
    alike(world, route=first)
    world.finish()
    alike(world, route="remote")
    (leg,) = world.legs
    assert (leg.sequence.num_cached, leg.num_pushed) == (20, 20)
    world.finish()


def test_kv_that_came_in_part_is_not_known():
    world = make_world()
    alike(world, route="remote")
    (leg,) = world.legs
    world.push(leg, 20)
    world.fail(leg)
    world.scheduler.admit()
    world.act()
    assert [leg.sequence.num_cached for leg in world.legs] == [0, 0]
    world.finish()


def test_the_kv_of_answers_is_known_too():
    world = make_world()
    first = world.ask(10, 15)
    world.finish()
    world.ask(40, 4, after=first.tokens)
    world.finish()
    assert world.admitted[-1].num_cached == 24  # of 25 tokens the last was never computed


def test_an_aborted_request_leaves_what_its_steps_have_finished():
    world = make_world(local_prefill_tokens=8, depth=1)
    asked = alike(world)
    world.step()
    world.plan()
    world.abort(asked)
    alike(world)
    assert world.admitted[-1].num_cached == 8
    world.finish()


def test_a_preempted_sequence_goes_on_from_what_is_still_there():
    world = make_world(9, headroom_tokens=0, local_prefill_tokens=16)
    world.ask(8, 20)
    world.clock.advance(0.1)
    world.ask(12, 20)
    world.step_until(lambda: world.replaced)
    (preempted,) = world.replaced
    world.finish()
    next_life = world.admitted[-1]
    assert next_life.key == preempted.key
    assert 8 <= next_life.num_cached < len(preempted.token_ids)
    assert world.scheduler.num_preemptions == 1


def test_choices_fork_from_shared_blocks_and_copy_their_last():
    world = make_world()
    alike(world)
    world.finish()
    alike(world, num_choices=3)
    world.finish()
    assert starts(world)[-1] == 20
    sources = {copy.source for copy in world.copies}
    assert len(sources) == 1
    assert not any(map(world.ledger.pool.cache.is_named, sources))
