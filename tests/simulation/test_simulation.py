"""Whole clusters under any schedule: what every request gets, and what is left afterwards.

A schedule that fails is printed in the smallest form that hypothesis finds; ``simulate`` runs it
again. ``make simulate`` runs thousands; with ``SEED=N`` those of a seed.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.simulation.schedule import SCHEDULES, Cluster, Fault, Kind, Schedule, Wish
from tests.simulation.simulation import simulate

QUICK = settings(
    max_examples=100,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of faults are logged otherwise, and kept."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(900)  # seconds where nothing else runs
@given(schedule=SCHEDULES)
@QUICK
def test_whatever_happens_answers_are_right_and_nothing_is_left(
    model_dir: Path, schedule: Schedule
) -> None:
    simulate(schedule, model_dir)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@given(schedule=SCHEDULES)
@settings(QUICK, max_examples=3000)
def test_whatever_happens_for_long_answers_are_right(model_dir: Path, schedule: Schedule) -> None:
    simulate(schedule, model_dir)


@pytest.mark.timeout(900)
@given(schedule=SCHEDULES)
@settings(QUICK, max_examples=8)
def test_a_schedule_says_all_that_will_happen(model_dir: Path, schedule: Schedule) -> None:
    """So a failing one can be seen again."""

    def run() -> object:
        simulation = simulate(schedule, model_dir)
        heard = [[a.got_tokens for a in c.answers.values()] for c in simulation.clients]
        return simulation.loop.time(), heard, [c.error for c in simulation.clients]

    assert run() == run()


WISHES = tuple(
    Wish(at_s=i / 4, router=0, prompt_len=10 + 3 * i, max_tokens=16, num_choices=1 + i % 2)
    for i in range(6)
)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.KILL_ROUTER])
def test_where_one_node_is_left_no_client_sees_any_fault(model_dir: Path, kind: Kind) -> None:
    """Two of each role, and time enough between the faults to come back."""
    faults = tuple(
        Fault(kind=kind, at_s=at_s, node=node, other=node, lasts_s=2.5)
        for node, at_s in enumerate([0.5, 6.0, 12.0, 18.0])
    )
    schedule = Schedule(
        cluster=Cluster(num_decode=2, num_prefill=2),
        wishes=WISHES,
        faults=faults,
        longest_s=0.1,
    )
    simulation = simulate(schedule, model_dir)
    assert [client.error for client in simulation.clients] == [None] * len(simulation.clients)
