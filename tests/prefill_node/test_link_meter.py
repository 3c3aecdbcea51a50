"""The speed of links, from handoffs of which some say nothing of it."""

import pytest

from pdserve.core.cost import LinkCost
from pdserve.core.request import HandoffId
from prefill_node.link_meter import LinkMeter

S_PER_BYTE, LATENCY_S = 1e-6, 0.002


def handoff(number: int) -> HandoffId:
    return HandoffId("request", 0, number)


def link_s(num_bytes: float) -> float:
    return LATENCY_S + S_PER_BYTE * num_bytes


def known(meter: LinkMeter) -> LinkCost:
    cost = meter.cost()
    assert cost is not None
    return cost


def send_whole(meter: LinkMeter, number: int, num_tokens: int, now_s: float = 0.0) -> None:
    """A prompt of one chunk, alone on the link; 100 bytes a token."""
    meter.pushed(handoff(number), num_tokens, now_s, last=True)
    num_bytes = 100 * num_tokens
    meter.sent(handoff(number), num_bytes, now_s + link_s(num_bytes))


def test_handoffs_of_several_sizes_tell_latency_and_speed() -> None:
    meter = LinkMeter(token_bytes=100, num_ranks=1)
    assert meter.cost() is None
    for number, num_tokens in enumerate((10, 100, 1000, 5000)):
        send_whole(meter, number, num_tokens)
    assert known(meter).tokens_s(2000) == pytest.approx(link_s(200_000), rel=0.01)


def test_time_in_which_nothing_was_computed_yet_does_not_slow_the_link() -> None:
    meter = LinkMeter(token_bytes=100, num_ranks=1)
    for number in range(4):
        meter.pushed(handoff(number), 400, 0.0, last=False)
        meter.pushed(handoff(number), 400, 5.0, last=True)
        meter.sent(handoff(number), 80_000, 5.0 + link_s(40_000))
    assert known(meter).tokens_s(400) == pytest.approx(link_s(40_000), rel=0.01)


def test_a_link_slower_than_computing_is_measured_over_the_whole_handoff() -> None:
    meter = LinkMeter(token_bytes=100, num_ranks=1)
    for number in range(4):
        meter.pushed(handoff(number), 700, 0.0, last=False)
        meter.pushed(handoff(number), 100, 0.001, last=True)
        meter.sent(handoff(number), 80_000, link_s(80_000))
    assert known(meter).tokens_s(800) == pytest.approx(link_s(80_000), rel=0.05)


def test_handoffs_that_share_the_link_say_nothing() -> None:
    meter = LinkMeter(token_bytes=100, num_ranks=1)
    meter.pushed(handoff(0), 100, 0.0, last=True)
    meter.pushed(handoff(1), 100, 0.0, last=True)
    meter.sent(handoff(0), 10_000, 9.0)
    meter.sent(handoff(1), 10_000, 9.0)
    assert meter.cost() is None


def test_a_handoff_counts_when_all_ranks_have_sent_their_share() -> None:
    meter = LinkMeter(token_bytes=100, num_ranks=2)
    meter.pushed(handoff(0), 100, 0.0, last=True)
    meter.sent(handoff(0), 5_000, 0.5)
    assert meter.cost() is None
    meter.sent(handoff(0), 5_000, 1.0)
    assert known(meter).tokens_s(100) == pytest.approx(1.0, rel=0.01)


def test_a_handoff_that_failed_leaves_nothing_behind() -> None:
    meter = LinkMeter(token_bytes=100, num_ranks=1)
    meter.pushed(handoff(0), 100, 0.0, last=True)
    meter.ended(handoff(0))
    meter.sent(handoff(0), 10_000, 9.0)
    assert meter.cost() is None
    send_whole(meter, 1, 100, now_s=20.0)
    assert known(meter).tokens_s(100) == pytest.approx(link_s(10_000), rel=0.01)
