"""The prefill scheduler under everything at once: random prompts, slow handoffs and aborts."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.prefill_node.world import Prefill, World

PROMPTS = st.fixed_dictionaries(
    {
        "prompt_len": st.integers(1, 40),
        "num_choices": st.integers(1, 3),
        "penalty": st.sampled_from([0.0, 0.5]),
        "num_alike": st.sampled_from([0, 3, 8, 20, 40]),
        "cache_salt": st.sampled_from([b"", b"", b"", b"other"]),
    }
)


class PrefillMachine(RuleBasedStateMachine):
    """Operations in any order; at the end everything that was asked for must have come."""

    world: World

    @initialize(
        depth=st.integers(1, 3),
        block_size=st.sampled_from([1, 2, 4]),
        num_tokens=st.integers(8, 96),
        num_slots=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 24),
    )
    def start(self, block_size, num_tokens, **others):
        self.world = World(num_blocks=num_tokens // block_size, block_size=block_size, **others)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), apart_s=st.sampled_from([0.0, 0.3]))
    def ask(self, prompts, apart_s):
        for wish in prompts:
            prompt_len = min(wish["prompt_len"], self.world.ledger.max_tokens)
            self.world.ask(**(wish | {"prompt_len": prompt_len}))
            self.world.clock.advance(apart_s)

    @rule()
    def plan(self):
        self.world.plan()

    @rule()
    def compute(self):
        self.world.executor.run_one()

    @precondition(lambda self: self.world.executor.num_in_flight)
    @rule()
    def apply(self):
        self.world.apply()

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.world.step()

    @rule(duration_s=st.floats(0, 3))
    def advance(self, duration_s):
        self.world.clock.advance(duration_s)

    @precondition(lambda self: self._in_work())
    @rule(data=st.data())
    def abort(self, data):
        self.world.abort(data.draw(st.sampled_from(self._in_work())))

    @precondition(lambda self: self._may_end())
    @rule(data=st.data())
    def end(self, data):
        self.world.end(data.draw(st.sampled_from(self._may_end())))

    @rule()
    def finish(self):
        self.world.finish()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()

    def _in_work(self) -> list[Prefill]:
        return [p for p in self.world.prefills if not p.aborted]

    def _may_end(self) -> list[Prefill]:
        return [p for p in self.world.prefills if p.aborted or p.is_computed]


QUICK = settings(
    max_examples=120,
    stateful_step_count=40,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def test_whatever_happens_every_prompt_is_computed_and_every_block_comes_back():
    run_state_machine_as_test(PrefillMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_happens_for_long_every_prompt_is_computed():
    run_state_machine_as_test(
        PrefillMachine, settings=settings(QUICK, max_examples=2000, stateful_step_count=80)
    )
