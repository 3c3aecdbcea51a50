"""Workloads: right lengths at the right times, from a seed or from a trace."""

import itertools
import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.workload import (
    Arrival,
    arrival_times,
    at_rate,
    cut,
    prompt_ids,
    random_workload,
    read_trace,
)
from pdserve.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
"""


def test_a_poisson_process_has_the_asked_mean_rate() -> None:
    times = arrival_times(4000, rate=8.0, burstiness=1.0, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(8.0, rel=0.1)


def test_less_burstiness_has_more_uneven_gaps() -> None:
    def variation(burstiness: float) -> float:
        times = arrival_times(4000, rate=8.0, burstiness=burstiness, seed=1)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert variation(0.25) == pytest.approx(2.0, rel=0.2)
    assert variation(4.0) == pytest.approx(0.5, rel=0.2)


def test_an_infinite_rate_has_all_arrive_at_once() -> None:
    assert arrival_times(3, rate=float("inf"), burstiness=1.0, seed=0) == [0.0] * 3


@given(st.integers(0, 1000))
def test_lengths_lie_within_their_bounds_and_follow_from_the_seed(seed: int) -> None:
    def made() -> list[Arrival]:
        return random_workload(
            num_requests=20,
            prompt_lens=(3, 9),
            output_lens=(2, 2),
            rate=5.0,
            burstiness=1.0,
            seed=seed,
        )

    assert made() == made()
    assert all(3 <= each.prompt_len <= 9 and each.output_len == 2 for each in made())


def test_an_azure_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.arrival_s, first.prompt_len, first.output_len) == (0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579)
    assert (second.prompt_len, second.output_len) == (396, 109)


def test_a_mooncake_trace_counts_milliseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows: list[dict[str, object]] = [
        {"timestamp": time_ms, "input_length": 10, "output_length": 3, "hash_ids": []}
        for time_ms in (500, 2500)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [each.arrival_s for each in read_trace(path)] == [0, 2.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "x,y\n1,2\n"), ("a.csv", ""), ("a.jsonl", "{}"), ("a.jsonl", "no json")],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"trace .*{name}: not a CSV of TIMESTAMP"):
        read_trace(path)


def test_a_missing_trace_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace .*none.csv: No such file"):
        read_trace(tmp_path / "none.csv")


def test_stretching_sets_the_mean_rate_and_keeps_the_shape() -> None:
    rows = random_workload(
        num_requests=5,
        prompt_lens=(1, 1),
        output_lens=(1, 1),
        rate=1.0,
        burstiness=1.0,
        seed=0,
    )
    stretched = at_rate(rows, 2.0)
    assert 4 / stretched[-1].arrival_s == pytest.approx(2.0)
    factors = [b.arrival_s / a.arrival_s for a, b in zip(rows[1:], stretched[1:], strict=True)]
    assert factors == pytest.approx([factors[0]] * 4)


def test_cutting_bounds_lengths() -> None:
    row = Arrival(index=0, arrival_s=0.0, prompt_len=9000, output_len=0)
    (short,) = cut([row], max_prompt_len=100, max_output_len=10)
    assert (short.prompt_len, short.output_len) == (100, 1)


def test_prompts_of_one_run_differ_and_are_the_same_again() -> None:
    one, other = (
        Arrival(index=index, arrival_s=0.0, prompt_len=12, output_len=1) for index in (0, 1)
    )
    assert prompt_ids(one, seed=3, vocab_size=50) == prompt_ids(one, seed=3, vocab_size=50)
    assert prompt_ids(one, seed=3, vocab_size=50) != prompt_ids(other, seed=3, vocab_size=50)
    assert max(prompt_ids(one, seed=3, vocab_size=50)) < 50
