"""Prefill nodes that fail again and again, by stage."""

import pytest

from decode_node.prefill_breakers import PrefillBreakers
from pdserve.core.breaker import FAILURES_TO_OPEN, BreakerState, Duty, Trouble


def failing(kind: str, times: int = FAILURES_TO_OPEN) -> PrefillBreakers:
    breakers = PrefillBreakers()
    breakers.meet("prefill-0", "prefill-0#1")
    for _ in range(times):
        assert breakers.allows("prefill-0", 0.0)
        breakers.failed("prefill-0", kind, "broken", 0.0)
    return breakers


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("rank_error", Duty.PREFILL),
        ("prefill_failed_error", Duty.PREFILL),
        ("node_lost_error", Duty.PREFILL),
        ("transfer_error", Duty.LINK),
        ("link_down_error", Duty.LINK),
        ("checksum_error", Duty.LINK),
        ("transfer_timeout_error", Duty.LINK),
    ],
)
def test_failures_open_the_breaker_of_their_stage(kind: str, stage: Duty) -> None:
    breakers = failing(kind)
    assert not breakers.allows("prefill-0", 0.5)
    reason = f"{kind}: broken"
    trouble = Trouble(node="prefill-0", stage=stage, state=BreakerState.OPEN, reason=reason)
    assert breakers.troubles(0.5) == [trouble]


def test_a_trial_whose_request_is_dropped_makes_way_for_another() -> None:
    breakers = failing("transfer_error")
    half_open_s = 10.0
    breakers.sent("prefill-0", half_open_s)
    assert not breakers.allows("prefill-0", half_open_s)
    breakers.released("prefill-0")
    assert breakers.allows("prefill-0", half_open_s)


@pytest.mark.parametrize("kind", ["invalid_request_error", "never_fits_error"])
def test_what_a_client_did_wrong_never_counts(kind: str) -> None:
    breakers = failing(kind, times=10)
    assert breakers.troubles(0.5) == []


def test_prefills_that_work_do_not_excuse_a_link_that_fails() -> None:
    breakers = PrefillBreakers()
    breakers.meet("prefill-0", "prefill-0#1")
    for _ in range(FAILURES_TO_OPEN):
        breakers.prefilled("prefill-0")
        breakers.failed("prefill-0", "checksum_error", "broken", 0.0)
    assert not breakers.allows("prefill-0", 0.5)


def test_one_request_tries_and_its_kv_closes_the_breaker() -> None:
    breakers = failing("checksum_error")
    assert breakers.allows("prefill-0", 2.0)
    breakers.sent("prefill-0", 2.0)
    assert not breakers.allows("prefill-0", 2.1)
    breakers.arrived("prefill-0")
    assert breakers.allows("prefill-0", 2.1)


def test_a_node_made_anew_starts_with_a_clean_record() -> None:
    breakers = failing("rank_error")
    breakers.meet("prefill-0", "prefill-0#1")
    assert not breakers.allows("prefill-0", 0.5)
    breakers.meet("prefill-0", "prefill-0#2")
    assert breakers.allows("prefill-0", 0.5)
