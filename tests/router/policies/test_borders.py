"""Borders of classes follow the traffic, but not chance, and not far."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.config import PromptClass
from router.policies.borders import LOOK_EVERY, MOST_MOVED, Borders

TWO = (PromptClass(name="a", below=1000), PromptClass(name="b"))
THREE = (
    PromptClass(name="a", below=100),
    PromptClass(name="b", below=1000),
    PromptClass(name="c"),
)


def work(borders: Borders, lengths: list[int], classes: tuple[PromptClass, ...]) -> list[int]:
    sums = [0] * len(classes)
    for length in lengths:
        sums[borders.lane_of(length)] += length
    return sums


def test_a_border_goes_to_where_both_sides_have_equal_work() -> None:
    dice, borders = random.Random(1), Borders(TWO)
    lengths = [dice.randrange(200, 900) for _ in range(20 * LOOK_EVERY)]
    for length in lengths:
        borders.saw(length)
    left, right = work(borders, lengths, TWO)
    assert max(left, right) / (left + right) < 0.65
    assert borders.bounds[0] < 900


def test_a_class_with_more_nodes_gets_more_of_the_work() -> None:
    classes = (
        PromptClass(name="a", below=1000, prefill_nodes=("p0", "p1", "p2")),
        PromptClass(name="b", prefill_nodes=("p3",)),
    )
    dice, borders = random.Random(1), Borders(classes)
    lengths = [dice.randrange(200, 900) for _ in range(20 * LOOK_EVERY)]
    for length in lengths:
        borders.saw(length)
    left, right = work(borders, lengths, classes)
    assert left > 2 * right


def test_balanced_traffic_moves_nothing() -> None:
    borders = Borders(TWO)
    for _ in range(2 * LOOK_EVERY):
        assert borders.saw(500) is None
        assert borders.saw(500) is None
        assert borders.saw(1000) is None
    assert borders.bounds == (1000,)


def test_nothing_moves_before_enough_was_seen() -> None:
    borders = Borders(TWO)
    for _ in range(LOOK_EVERY - 1):
        assert borders.saw(10) is None
    assert borders.saw(10) is not None


def test_one_class_has_no_border_to_move() -> None:
    borders = Borders((PromptClass(name="all"),))
    assert all(borders.saw(5) is None for _ in range(3 * LOOK_EVERY))


@pytest.mark.parametrize("length", [1, 10**6])
def test_a_border_never_goes_far_from_the_file(length: int) -> None:
    borders = Borders(TWO)
    for _ in range(30 * LOOK_EVERY):
        borders.saw(length)
    assert 1000 / MOST_MOVED <= borders.bounds[0] <= 1000 * MOST_MOVED


@given(st.integers(0, 2**32), st.integers(1, 5000), st.integers(1, 5000))
def test_borders_ascend_whatever_comes(seed: int, low: int, width: int) -> None:
    dice, borders = random.Random(seed), Borders(THREE)
    for _ in range(4 * LOOK_EVERY):
        borders.saw(low + dice.randrange(width))
    assert all(a < b for a, b in pairwise((0, *borders.bounds)))
