"""What the decode scheduler does with sequences whose next token a grammar has a say in."""

from pdserve.core.request import FinishReason
from pdserve.engine.batch import Carried
from pdserve.engine.constraint import Constraint
from tests.decode_node.world import World, make_world
from tests.prompts import VOCAB_SIZE

EVERY_TOKEN = bytes([0xFF] * -(-VOCAB_SIZE // 8))


class SlowConstraint:
    """Allows every token; its mask is known when the test says so. Ends after ``most`` tokens."""

    def __init__(self, *, most: int = 1000, mask: bytes | None = None) -> None:
        self.mask = mask
        self.taken: list[int] = []
        self.copies: list[SlowConstraint] = []
        self._most = most

    def advance(self, token_id: int) -> bool:
        assert self.mask is not None, "sampled before its mask was known"
        self.mask = None
        self.taken.append(token_id)
        return len(self.taken) == self._most

    def copy(self) -> Constraint:
        self.copies.append(SlowConstraint(most=self._most, mask=self.mask))
        return self.copies[-1]


def work_out(*constraints: SlowConstraint) -> None:
    """The masks are there now."""
    for constraint in constraints:
        constraint.mask = EVERY_TOKEN


def finish(world: World, *constraints: SlowConstraint) -> None:
    """Take turns to the end; each mask is there a turn after it was wanted."""
    for _ in range(200):
        world.step()
        work_out(*constraints, *(copy for each in constraints for copy in each.copies))


def test_a_sequence_waits_for_its_grammar_without_blocks_and_others_pass_it():
    world, constraint = make_world(), SlowConstraint()
    slow = world.ask(9, 4, constraint=constraint)
    quick = world.ask(9, 4)
    assert (slow.num_blocks, quick.num_blocks > 0) == (0, True)
    work_out(constraint)
    world.scheduler.admit()
    world.act()
    assert slow.num_blocks > 0


def test_it_is_never_planned_ahead_and_each_of_its_steps_has_its_mask():
    world, constraint = make_world(depth=2), SlowConstraint(mask=EVERY_TOKEN)
    asked = world.ask(9, 6, constraint=constraint)
    finish(world, constraint)
    chunks = [chunk for batch in world.batches for chunk in batch.chunks]
    assert not any(isinstance(chunk.tokens, Carried) for chunk in chunks)
    for batch in world.batches:
        sampling = [chunk.slot for chunk in batch.chunks if chunk.num_samples]
        assert [mask.slot for mask in batch.masks] == sampling
        assert all(mask.bits == EVERY_TOKEN for mask in batch.masks)
    assert asked.got == asked.expected
    assert constraint.taken == asked.got[0]


def test_others_go_on_while_a_mask_is_worked_out():
    world, constraint = make_world(depth=1), SlowConstraint(mask=EVERY_TOKEN)
    slow, quick = world.ask(4, 8, constraint=constraint), world.ask(4, 8)
    world.step_until(lambda: quick.ended)
    assert len(slow.got[0]) == 1


def test_an_answer_ends_with_its_grammar():
    world, constraint = make_world(), SlowConstraint(most=3, mask=EVERY_TOKEN)
    asked = world.ask(9, 3, constraint=constraint)
    finish(world, constraint)
    assert asked.got == asked.expected
    assert asked.ended == {0: FinishReason.STOP}
    assert world.ledger.is_empty


def test_choices_share_the_first_mask_and_go_on_each_with_their_own():
    world, constraint = make_world(), SlowConstraint(mask=EVERY_TOKEN)
    asked = world.ask(9, 5, num_choices=3, constraint=constraint)
    finish(world, constraint)
    assert asked.got == asked.expected
    assert [copy.taken for copy in constraint.copies] == [asked.got[i] for i in range(3)]
    assert constraint.taken == []


def test_after_a_preemption_it_goes_on_where_it_was():
    world = make_world(8, headroom_tokens=0, depth=2)
    constraints = [SlowConstraint(mask=EVERY_TOKEN) for _ in range(3)]
    asked = [world.ask(6, 12, constraint=constraint) for constraint in constraints]
    finish(world, *constraints)
    assert world.replaced
    for each, constraint in zip(asked, constraints, strict=True):
        assert each.got == each.expected
        assert constraint.taken == each.got[0]
