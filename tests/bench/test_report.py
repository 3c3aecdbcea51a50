"""Reports: latencies are those of the definitions, goodput counts what kept every limit, capacity
is found between the rates that hold and those that do not.
"""

import pytest

from pdserve.bench.compare import table
from pdserve.bench.load import Outcome
from pdserve.bench.overload import CapacitySearch, compare
from pdserve.bench.report import (
    Limits,
    by_prompt_len,
    parse_limits,
    percentile,
    report,
    report_by_prompt_len,
)
from pdserve.bench.workload import Arrival
from pdserve.core.errors import ConfigError


def outcome(
    *times_s: float, sent_s: float = 0.0, error: str | None = None, prompt_len: int = 10
) -> Outcome:
    return Outcome(
        arrival=Arrival(index=0, arrival_s=sent_s, prompt_len=prompt_len, output_len=len(times_s)),
        sent_s=sent_s,
        token_times_s=times_s,
        end_s=max([sent_s, *times_s]),
        num_tokens=len(times_s),
        error=error,
    )


def test_times_are_counted_from_sending_and_between_tokens() -> None:
    seen = report([outcome(1.2, 1.3, 1.6, sent_s=1.0)], Limits())
    assert seen["mean_ttft_ms"] == pytest.approx(200)
    assert seen["mean_tpot_ms"] == pytest.approx(200)
    assert seen["p99_itl_ms"] == pytest.approx(298)
    assert seen["mean_e2el_ms"] == pytest.approx(600)
    assert (seen["total_output_tokens"], seen["output_throughput"]) == (3, pytest.approx(5.0))


def test_failures_are_counted_by_name_and_have_no_latency() -> None:
    seen = report([outcome(0.5), outcome(error="http 429"), outcome(error="http 429")], Limits())
    assert (seen["completed"], seen["failed"], seen["errors"]) == (1, 2, {"http 429": 2})
    assert seen["median_ttft_ms"] == pytest.approx(500)


def test_goodput_counts_requests_within_every_limit() -> None:
    outcomes = [outcome(0.1, 0.2), outcome(0.1, 0.9), outcome(0.4, 0.5), outcome(0.1, error="x")]
    limits = parse_limits(["ttft:200", "tpot:150"])
    assert report(outcomes, limits)["good_share"] == 0.25


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "what:3"])
def test_bad_limits_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput: got"):
        parse_limits([word])


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (100, 4.0)])
def test_percentiles_lie_between_the_ranks(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_parts_by_prompt_length_hold_each_request_once() -> None:
    outcomes = [outcome(0.1, prompt_len=length) for length in (5, 10, 99, 100, 7000)]
    assert by_prompt_len(outcomes, (10, 100), len) == {"0-10": 1, "10-100": 2, "100-": 2}


def test_rates_of_the_parts_are_over_the_time_of_all_and_add_up() -> None:
    first = [outcome(0.5, 1.0), outcome(0.5, 4.0, prompt_len=500, sent_s=3.0)]
    second = [outcome(100.5, 106.0, sent_s=100.0), outcome(101.0, sent_s=100.5, error="x")]
    limits = Limits(e2el_ms=3000)
    parts = report_by_prompt_len([first, second], (100,), limits)
    assert [part["duration"] for part in parts.values()] == [10.0, 10.0], "4 s and 6 s"
    assert [part["request_throughput"] for part in parts.values()] == [0.2, 0.1]
    assert [part["request_goodput"] for part in parts.values()] == [0.1, 0.1]
    whole = report(first, limits)
    for name in ("request_throughput", "output_throughput", "request_goodput"):
        shares = [part[name] for part in report_by_prompt_len([first], (100,), limits).values()]
        assert sum(share for share in shares if isinstance(share, float)) == pytest.approx(
            whole[name]
        )


@pytest.mark.parametrize("true_capacity", [0.3, 1.0, 5.7, 40.0])
def test_the_search_ends_just_below_what_the_server_holds(true_capacity: float) -> None:
    search, tries = CapacitySearch(1.0, 0.95), 0
    while search.rate is not None:
        search.on(1.0 if search.rate <= true_capacity else 0.5)
        tries += 1
    assert true_capacity / 1.1 <= search.capacity <= true_capacity
    assert tries < 15


def test_a_server_that_holds_nothing_has_no_capacity() -> None:
    search = CapacitySearch(1.0, 0.95)
    while search.rate is not None:
        search.on(0.0)
    assert search.capacity == 0.0


def test_overload_is_compared_with_capacity() -> None:
    at = [outcome(0.1, 0.2), outcome(0.1, 1.0)]
    over = [outcome(0.15, 0.2), outcome(0.15, 2.0), outcome(error="http 429"), outcome(error="x")]
    seen = compare(at, over, parse_limits(["ttft:1000"]))
    assert seen["p99_ttft_ratio"] == pytest.approx(1.5)
    assert seen["goodput_ratio"] == pytest.approx(0.5)
    assert (seen["num_refused"], seen["other_errors"]) == (1, 1)


def test_cases_stand_beside_the_first_with_their_ratios() -> None:
    def part(ttft_ms: float) -> dict[str, object]:
        return {"num_prompts": 3, "p99_ttft_ms": ttft_ms}

    lines = table({"fcfs": {"0-": part(300.0)}, "lanes": {"0-": part(100.0)}})
    assert "300.00 (1.00)" in lines[2]
    assert "100.00 (0.33)" in lines[3]
    assert lines[3].split()[0] == "lanes"
