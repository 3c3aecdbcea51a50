"""What a node learns of its steps' costs, whatever they are made of."""

import pytest

from pdserve.core.cost import attended
from pdserve.engine.batch import Batch, Carried, Chunk, Slot
from pdserve.rank.step_meter import StepMeter


def decode(slot: int, start: int) -> Chunk:
    return Chunk(slot=Slot(slot), start=start, tokens=Carried(), new_blocks=(), num_samples=1)


def prompt(slot: int, start: int, length: int) -> Chunk:
    tokens = (0,) * length
    return Chunk(slot=Slot(slot), start=start, tokens=tokens, new_blocks=(), num_samples=0)


def took_s(*chunks: Chunk) -> float:
    """The true costs: 10 ms + 2 ms a decode + 1 µs a token of its context; prompts 30 ms + 1 ms a
    token + 0.1 µs a pair. Prompts and decodes in one step share the prompts' first term.
    """
    decodes = [c for c in chunks if c.length == 1]
    prompts = [c for c in chunks if c.length > 1]
    seconds = 0.030 if prompts else 0.010
    seconds += sum(0.002 + 1e-6 * (c.start + 1) for c in decodes)
    return seconds + sum(0.001 * c.length + 1e-7 * attended(c.length, c.start) for c in prompts)


def observe(meter: StepMeter, *chunks: Chunk) -> None:
    meter.observe(Batch(step=0, chunks=chunks), took_s(*chunks))


def test_decode_steps_teach_the_decode_cost() -> None:
    meter = StepMeter()
    for num, context in ((1, 10), (4, 10), (4, 900), (16, 100)):
        observe(meter, *(decode(i, context - 1) for i in range(num)))
    cost = meter.costs().decode
    assert cost is not None
    assert cost.step_s(8, 8 * 300) == pytest.approx(0.010 + 8 * 0.002 + 1e-6 * 2400, rel=1e-3)
    assert meter.costs().prefill is None


def test_prompt_chunks_teach_the_prefill_cost_with_decodes_beside_them_or_not() -> None:
    meter = StepMeter()
    for num, context in ((1, 10), (4, 10), (4, 900), (16, 100)):
        observe(meter, *(decode(i, context - 1) for i in range(num)))
    meter.costs()  # from here on the decodes' share of a mixed step is known
    for length, start in ((16, 0), (64, 0), (256, 0), (256, 512)):
        observe(meter, prompt(0, start, length))
        observe(meter, prompt(0, start, length), *(decode(i, 99) for i in range(1, 5)))
    for _ in range(8):
        observe(meter, prompt(0, 0, 64))
    cost = meter.costs().prefill
    assert cost is not None
    expected = 0.030 + 0.1 + 1e-7 * attended(100, 300)
    assert cost.chunk_s(100, 300) == pytest.approx(expected, rel=1e-2)


def test_a_step_of_both_teaches_nothing_while_decodes_are_unknown() -> None:
    meter = StepMeter()
    observe(meter, prompt(0, 0, 64), decode(1, 10))
    assert meter.costs().prefill is None


def test_costs_are_known_from_the_first_step_on() -> None:
    meter = StepMeter()
    assert meter.costs().prefill is None
    observe(meter, prompt(0, 0, 64))
    assert meter.costs().prefill is not None


def test_a_step_that_computes_nothing_teaches_nothing() -> None:
    meter = StepMeter()
    meter.observe(Batch(step=0, left=(Slot(0),)), 1.0)
    assert meter.costs().decode is None


def test_a_gpus_time_is_told_by_kind_where_it_is_measured() -> None:
    meter = StepMeter()
    meter.observe(Batch(step=0, chunks=(decode(0, 5),)), 0.5)
    assert not [line for line in meter.tally.lines({}) if "device_seconds" in line]
    for device_s in (0.25, 0.125):
        meter.observe(Batch(step=1, chunks=(decode(0, 6),)), 0.5, device_s)
    meter.observe(Batch(step=3, chunks=(decode(0, 7), prompt(1, 0, 9))), 0.5, 0.375)
    lines = [line for line in meter.tally.lines({"node": "d"}) if "device_seconds_total{" in line]
    assert lines == [
        'pdserve:node_step_device_seconds_total{node="d",kind="decode"} 0.375',
        'pdserve:node_step_device_seconds_total{node="d",kind="mixed"} 0.375',
    ]
