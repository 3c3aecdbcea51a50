"""The text format, read back by Prometheus' own parser."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.telemetry.exposition import Histogram, family, histogram_family
from pdserve.telemetry.process_metrics import ProcessMetrics
from tests.telemetry.scrape import Scrape, problems

PATIENT = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
labels = st.dictionaries(st.sampled_from(["node", "kind", "stage"]), st.text(max_size=20))


@PATIENT
@given(labels=labels, value=st.floats(allow_nan=False, allow_infinity=False))
def test_any_label_and_value_is_read_back_as_it_was(labels: dict[str, str], value: float) -> None:
    (sample,) = Scrape("\n".join([*family("x", "gauge", "A text.", [(labels, value)]), ""])).samples
    assert (sample.name, sample.labels, sample.value) == ("pdserve:x", labels, value)


@PATIENT
@given(values=st.lists(st.floats(0, 1e6)), labels=labels)
def test_a_histogram_counts_each_observation_up_to_each_bound(
    values: list[float], labels: dict[str, str]
) -> None:
    bounds = (0.1, 1.0, 50.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    text = "\n".join([*histogram_family("x_seconds", "A text.", [(labels, histogram)]), ""])
    assert problems(text) == []
    scrape = Scrape(text)
    assert scrape.buckets("x_seconds", **labels) == [
        (bound, sum(value <= bound for value in values)) for bound in (*bounds, float("inf"))
    ]
    assert scrape.value("x_seconds_count") == len(values)
    assert scrape.value("x_seconds_sum") == pytest.approx(sum(values))


def test_a_process_tells_of_itself_under_the_names_that_all_use() -> None:
    text = "\n".join([*ProcessMetrics().lines(), ""])
    assert problems(text) == []
    values = {sample.name: sample.value for sample in Scrape(text).samples}
    assert values["process_resident_memory_bytes"] > 1 << 20
    assert values["process_cpu_seconds_total"] > 0


def test_faults_of_a_scrape_are_found() -> None:
    text = (
        "# HELP pdserve:a_total Text.\n# TYPE pdserve:a_total gauge\npdserve:a_total 1\n"
        "# HELP pdserve:h Text.\n# TYPE pdserve:h histogram\n"
        'pdserve:h_bucket{le="1"} 3\npdserve:h_bucket{le="+Inf"} 2\n'
        "pdserve:h_sum 1\npdserve:h_count 2\n"
        "b_ms 4\n"
    )
    found = " ".join(problems(text))
    assert "_total, and no counter" in found
    assert "counts (3, 2)" in found
    assert "b_ms: no known prefix" in found
    assert "b_ms: not a base unit" in found
