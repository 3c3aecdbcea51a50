"""What strangers cause does not fill the log."""

from pdserve.core.refusals import PERIOD_S, Refusals


def test_one_line_a_while_says_how_many_were_left_out() -> None:
    refusals = Refusals()
    assert refusals.note("no key", 0.0) == "no key"
    assert [refusals.note("no key", 0.1 * i) for i in range(50)] == [None] * 50
    assert refusals.note("wrong key", PERIOD_S) == "wrong key (50 more since the last one)"
    assert refusals.note("no key", 2 * PERIOD_S) == "no key"
