"""The decode scheduler under everything at once: random requests, routes, failures and aborts."""

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

from decode_node.scheduler import DecodeLimits
from tests.decode_node.asked import Asked, Leg
from tests.decode_node.world import World
from tests.prompts import VOCAB_SIZE

REQUESTS = st.fixed_dictionaries(
    {
        "prompt_len": st.integers(1, 20),
        "max_tokens": st.integers(1, 20),
        "route": st.sampled_from(["remote", "local", "fallback"]),
        "num_choices": st.integers(1, 3),
        "ends": st.sampled_from([(), (), tuple(range(0, VOCAB_SIZE, 7))]),
        "min_tokens": st.integers(0, 3),
        "penalty": st.sampled_from([0.0, 0.5]),
        "num_alike": st.sampled_from([0, 3, 8, 15, 20]),
        "goes_on": st.sampled_from([False, False, True]),
        "cache_salt": st.sampled_from([b"", b"", b"", b"other"]),
        "admit": st.booleans(),
    }
)


class DecodeMachine(RuleBasedStateMachine):
    """Operations in any order; at the end everything that was asked for must have come."""

    world: World

    @initialize(
        depth=st.integers(1, 3),
        block_size=st.sampled_from([1, 2, 4]),
        num_tokens=st.integers(8, 64),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 16),
        local_prefill_tokens=st.integers(0, 8),
        fallback_chunk=st.integers(1, 8),
        headroom_tokens=st.integers(0, 9),
    )
    def start(self, depth, block_size, num_tokens, **limits):
        self.world = World(
            DecodeLimits(overtake_s=1.0, **limits),
            num_blocks=num_tokens // block_size,
            block_size=block_size,
            depth=depth,
        )

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4), apart_s=st.sampled_from([0.0, 0.3]))
    def ask(self, requests, apart_s):
        most = self.world.ledger.max_tokens
        for wish in requests:
            wish["after"] = self._conversation() if wish.pop("goes_on") else ()
            prompt_len = min(wish["prompt_len"], most - 1)
            fitted = {
                "prompt_len": prompt_len,
                "max_tokens": min(wish["max_tokens"], most - prompt_len),
                "num_choices": min(wish["num_choices"], self.world.limits.max_sequences),
            }
            self.world.ask(**(wish | fitted))
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

    @rule(duration_s=st.floats(0, 2))
    def advance(self, duration_s):
        self.world.clock.advance(duration_s)

    @precondition(lambda self: self._waiting_for_tokens())
    @rule(data=st.data())
    def bring_first_tokens(self, data):
        self.world.bring_first_tokens(data.draw(st.sampled_from(self._waiting_for_tokens())))

    @precondition(lambda self: self._pushing())
    @rule(data=st.data(), num_tokens=st.integers(1, 30))
    def push(self, data, num_tokens):
        self.world.push(data.draw(st.sampled_from(self._pushing())), num_tokens)

    @precondition(lambda self: self._not_dropped())
    @rule(data=st.data())
    def fail(self, data):
        self.world.fail(data.draw(st.sampled_from(self._not_dropped())))

    @precondition(lambda self: self._dropped())
    @rule(data=st.data())
    def drain(self, data):
        self.world.drain(data.draw(st.sampled_from(self._dropped())))

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def abort(self, data):
        self.world.abort(data.draw(st.sampled_from(self._unfinished())))

    @precondition(lambda self: self._parted())
    @rule(data=st.data())
    def end_choice(self, data):
        self.world.end_choice(*data.draw(st.sampled_from(self._parted())))

    @rule(newest_first=st.booleans(), one_at_a_time=st.booleans())
    def finish(self, newest_first, one_at_a_time):
        self.world.finish(newest_first=newest_first, one_at_a_time=one_at_a_time)

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()

    def _conversation(self) -> tuple[int, ...]:
        """What the latest request asked, and was answered so far."""
        return next((asked.tokens for asked in reversed(self.world.asked.values())), ())

    def _not_dropped(self) -> list[Leg]:
        return [leg for leg in self.world.legs if not leg.dropped]

    def _dropped(self) -> list[Leg]:
        return [leg for leg in self.world.legs if leg.dropped]

    def _waiting_for_tokens(self) -> list[Leg]:
        return [leg for leg in self._not_dropped() if not leg.has_first_tokens]

    def _pushing(self) -> list[Leg]:
        return [leg for leg in self._not_dropped() if not leg.is_ready]

    def _unfinished(self) -> list[Asked]:
        world = self.world
        return [a for a in world.asked.values() if not a.aborted and len(a.ended) < len(a.expected)]

    def _parted(self) -> list[tuple[Asked, int]]:
        return [
            (asked, choice)
            for asked in self._unfinished()
            for choice, sequence in asked.living.items()
            if len(asked.expected) > 1 and sequence.choices == (choice,)
        ]


QUICK = settings(
    max_examples=120,
    stateful_step_count=40,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def test_whatever_happens_every_request_gets_its_answer_and_every_block_comes_back():
    run_state_machine_as_test(DecodeMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_happens_for_long_every_request_gets_its_answer():
    run_state_machine_as_test(
        DecodeMachine, settings=settings(QUICK, max_examples=2000, stateful_step_count=80)
    )
