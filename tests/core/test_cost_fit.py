"""The fit finds what steps really cost, whatever the machine does beside them."""

import math
import random
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.core.cost_fit import MAX_BUCKETS, CostFit, Sample

SIZES = [(n, n * (start + n / 2)) for n, start in product((16, 64, 200, 512), (0, 512, 2048))]
A = st.floats(1e-4, 0.1)
B = st.floats(1e-6, 1e-3)
C = st.floats(0, 1e-6)


def seconds(a: float, b: float, c: float, x: float, y: float) -> float:
    return a + b * x + c * y


@given(A, B, C)
def test_samples_without_noise_give_back_every_prediction(a: float, b: float, c: float) -> None:
    fit = CostFit()
    for x, y in SIZES:
        fit.observe(seconds(a, b, c, x, y), x, y)
    found = fit.coefficients()
    assert found is not None
    for x, y in [*SIZES, (32, 32 * 1000)]:
        assert seconds(*found, x, y) == pytest.approx(seconds(a, b, c, x, y), rel=1e-3)


@settings(max_examples=25)
@given(A, B, C, st.integers(0, 2**32))
def test_noise_and_outliers_leave_predictions_near(a: float, b: float, c: float, seed: int) -> None:
    fit, dice = CostFit(), random.Random(seed)
    for _ in range(30):
        for x, y in SIZES:
            noise = dice.uniform(0.9, 1.1) * (10 if dice.random() < 0.1 else 1)
            fit.observe(noise * seconds(a, b, c, x, y), x, y)
    found = fit.coefficients()
    assert found is not None
    for x, y in SIZES:
        assert seconds(*found, x, y) == pytest.approx(seconds(a, b, c, x, y), rel=0.25)


@example([(1.0, 2.3e-311, 0.0)])
@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(allow_nan=True, allow_infinity=True),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=30,
    )
)
def test_whatever_is_observed_the_coefficients_are_finite_and_not_negative(
    samples: list[tuple[float, float, float]],
) -> None:
    fit = CostFit()
    for sample in samples:
        fit.observe(*sample)
    found = fit.coefficients()
    assert found is None or all(math.isfinite(value) and value >= 0 for value in found)


def test_one_size_seen_is_predicted_as_seen() -> None:
    fit = CostFit()
    for _ in range(5):
        fit.observe(0.25, 100, 5000)
    found = fit.coefficients()
    assert found is not None
    assert seconds(*found, 100, 5000) == pytest.approx(0.25)


def test_before_the_first_sample_nothing_is_known() -> None:
    assert CostFit().coefficients() is None


def test_a_machine_that_became_slower_is_believed_after_a_few_steps_of_each_size() -> None:
    fit = CostFit()
    for factor in (1.0, 3.0):
        for _ in range(10):
            for x, y in SIZES:
                fit.observe(factor * seconds(0.01, 0.001, 1e-7, x, y), x, y)
    found = fit.coefficients()
    assert found is not None
    for x, y in SIZES:
        assert seconds(*found, x, y) == pytest.approx(
            3 * seconds(0.01, 0.001, 1e-7, x, y), rel=0.01
        )


def test_memory_is_bounded_by_the_buckets() -> None:
    fit = CostFit()
    for i in range(40):
        for j in range(40):
            fit.observe(1.0, 2.0**i, 2.0**j)
    assert len(fit._buckets) == MAX_BUCKETS


@given(A, B, C, st.floats(0.01, 100).filter(lambda pace: not 0.7 < pace < 1.5))
def test_a_few_sizes_tried_again_bring_all_others_to_their_pace(
    a: float, b: float, c: float, pace: float
) -> None:
    fit = CostFit()
    for _ in range(12):
        for x, y in SIZES:
            fit.observe(seconds(a, b, c, x, y), x, y)
    tried = [Sample(pace * seconds(a, b, c, x, y), x, y) for x, y in SIZES[:2]]
    slower = [sample._replace(seconds=7 * sample.seconds) for sample in tried]
    assert fit.mend([*slower, *tried, *slower]) == pytest.approx(pace)
    found = fit.coefficients()
    assert found is not None
    for x, y in SIZES:
        assert seconds(*found, x, y) == pytest.approx(pace * seconds(a, b, c, x, y), rel=0.01)
    assert fit.mend(tried) == 1.0


def test_sizes_that_were_never_seen_tell_no_pace() -> None:
    fit = CostFit()
    fit.observe(0.25, 100, 5000)
    before = fit.coefficients()
    assert fit.mend([Sample(9.0, 1, 1), Sample(math.nan, 100, 5000)]) == 1.0
    assert fit.coefficients() == before
