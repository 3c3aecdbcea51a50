"""The circuit breaker by table, and by what may never happen whatever comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.breaker import (
    FAILURES_TO_OPEN,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    TRIAL_S,
    Breaker,
    BreakerState,
)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("broken", now_s)
    return breaker


def test_it_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed("broken", 0.0)
    breaker.succeeded()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed("broken", 0.0)
        assert breaker.allows(0.0)
    breaker.failed("the last straw", 0.0)
    assert not breaker.allows(0.0)
    assert breaker.reason == "the last straw"


def test_after_the_back_off_one_request_tries() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST_BACKOFF_S - 0.01)
    assert breaker.allows(FIRST_BACKOFF_S)
    breaker.sent(FIRST_BACKOFF_S)
    assert breaker.state(FIRST_BACKOFF_S) is BreakerState.HALF_OPEN
    assert not breaker.allows(FIRST_BACKOFF_S + 1)


def test_a_trial_that_never_ends_keeps_others_away_for_a_while_only() -> None:
    breaker = opened()
    breaker.sent(5.0)
    assert not breaker.allows(5.0 + TRIAL_S - 0.01)
    assert breaker.allows(5.0 + TRIAL_S)


def test_a_trial_that_says_nothing_lets_another_one_try() -> None:
    breaker = opened()
    assert breaker.wait_s(0.25) == FIRST_BACKOFF_S - 0.25
    breaker.sent(5.0)
    breaker.released()
    assert breaker.allows(5.0)
    assert breaker.wait_s(5.0) == 0


def test_a_trial_that_fails_doubles_the_back_off_up_to_the_longest() -> None:
    breaker, now_s, waits_s = opened(), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.5
        waits_s.append(now_s - began_s)
        breaker.sent(now_s)
        breaker.failed("still broken", now_s)
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, LONGEST_BACKOFF_S]


@pytest.mark.parametrize("ended_well", [True, False])
def test_progress_of_a_trial_closes_it_on_probation(ended_well: bool) -> None:
    breaker = opened()
    breaker.sent(2.0)
    breaker.progressed(2.5)
    assert breaker.allows(2.5)
    if ended_well:
        breaker.succeeded()
    breaker.failed("again", 3.0)
    assert breaker.allows(3.0) == ended_well


def test_progress_of_what_was_sent_before_does_not_close_it() -> None:
    breaker = opened()
    breaker.progressed(FIRST_BACKOFF_S / 2)
    assert not breaker.allows(FIRST_BACKOFF_S / 2)


@given(st.lists(st.tuples(st.sampled_from(["sent", "good", "end", "bad"]), st.floats(0, 40))))
def test_whatever_comes_it_opens_for_failures_only_and_never_for_good(
    events: list[tuple[str, float]],
) -> None:
    breaker, now_s = Breaker(), 0.0
    for event, wait_s in events:
        now_s += wait_s
        before = breaker.allows(now_s)
        match event:
            case "sent":
                breaker.sent(now_s)
            case "good":
                breaker.progressed(now_s)
            case "end":
                breaker.succeeded()
            case "bad":
                breaker.failed("broken", now_s)
        if event in ("good", "end"):
            assert breaker.allows(now_s) >= before
    assert breaker.allows(now_s + LONGEST_BACKOFF_S + TRIAL_S)
