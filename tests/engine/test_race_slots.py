"""Steps whose sequences all race from the logits as they lie draw what any step draws."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Joined, Slot, TokenMask
from pdserve.engine.noise import make_lanes, row_key, row_keys, signed_64, stream_of
from pdserve.engine.race_slots import RaceSlots
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import Sampler, SampleRow
from pdserve.engine.sampling_race import NO_TOP_K, Lots, draw
from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import chunk, joined, make_runner

CPU = torch.device("cpu")
WORDS = st.integers(0, (1 << 64) - 1)
POSITIONS = st.integers(0, (1 << 31) - 1)


class PlainRace:
    """A fast race that is the plain one, so that it can run here. Counts what it is asked."""

    def __init__(self, vocab_size: int) -> None:
        self._lanes = make_lanes(vocab_size, CPU)
        self.num_draws = 0

    def can_draw(self, sampling: SamplingParams) -> bool:
        return sampling.top_k is None or sampling.top_p >= 1

    def draw(self, logits: Tensor, lots: Lots) -> Tensor:
        self.num_draws += 1
        wants = [
            SamplingParams(
                max_tokens=1,
                temperature=temperature,
                top_k=None if top_k == NO_TOP_K else top_k,
                top_p=top_p,
                min_p=min_p,
            )
            for top_k, (temperature, top_p, min_p) in zip(
                lots.whole[:, 3].tolist(), lots.real.tolist(), strict=True
            )
        ]
        rows = lots.whole[:, 0].long()
        return draw(logits[rows].float(), lots.whole[:, 1:3].contiguous(), self._lanes, wants)


@given(st.lists(st.tuples(WORDS, POSITIONS), min_size=1, max_size=9))
def test_keys_of_many_rows_are_those_of_each(rows: list[tuple[int, int]]) -> None:
    streams = torch.tensor([signed_64(stream) for stream, _ in rows])
    found = row_keys(streams, torch.tensor([position for _, position in rows]))
    assert found.tolist() == [list(row_key(*row)) for row in rows]


@st.composite
def wishes(draw_one: st.DrawFn) -> SamplingParams:
    """Some race from the logits as they lie; others change them, want more or take the best."""
    return SamplingParams(
        max_tokens=50,
        temperature=draw_one(st.sampled_from([0.0, 0.6, 1.0, 1.7])),
        top_k=draw_one(st.none() | st.integers(1, 9)),
        top_p=draw_one(st.sampled_from([1.0, 0.5])),
        min_p=draw_one(st.sampled_from([0.0, 0.1])),
        seed=draw_one(st.integers(0, 1 << 40)),
        repetition_penalty=draw_one(st.sampled_from([1.0, 1.0, 1.0, 1.3])),
        logprobs=draw_one(st.sampled_from([None, None, None, 2])),
    )


@settings(max_examples=60)
@given(st.lists(st.tuples(wishes(), POSITIONS), min_size=1, max_size=8), st.randoms())
def test_what_races_is_sampled_alike_either_way(rows, random) -> None:
    sampler = Sampler(max_num_seqs=16, vocab_size=40, device=CPU)
    plain = Sampler(max_num_seqs=16, vocab_size=40, device=CPU)
    sampler._fast_race = race = PlainRace(40)
    slots = [Slot(slot) for slot in random.sample(range(16), len(rows))]
    for slot, (sampling, _) in zip(slots, rows, strict=True):
        history = (1, 2, 3) if sampling.needs_history else ()
        member = Joined(
            slot=slot,
            sampling=sampling,
            choices=(0,),
            end_token_ids=(),
            prompt_len=3,
            history=history,
            blocks=(),
        )
        sampler.join(member)
        plain.join(member)
    logits = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(1)) * 3
    positions = [position for _, position in rows]
    expected = plain.sample(
        logits,
        [
            SampleRow(slot=slot, choice=0, position=position)
            for slot, position in zip(slots, positions, strict=True)
        ],
    )
    for number, (slot, (sampling, position)) in enumerate(zip(slots, rows, strict=True)):
        is_bare = sampling.temperature > 0 and sampling.logprobs is None
        races = is_bare and not sampling.needs_history and race.can_draw(sampling)
        assert sampler.races([slot]) == races
        if races:
            found = sampler.race(logits[number : number + 1], [slot], [position])
            assert found.tokens.tolist() == expected.tokens[number : number + 1].tolist()
    if sampler.races(slots):
        assert sampler.race(logits, slots, positions).tokens.tolist() == expected.tokens.tolist()
    for slot in slots:
        sampler.leave(slot)
        assert not sampler.races([slot])


def test_a_slot_that_is_joined_again_is_told_of_anew() -> None:
    slots = RaceSlots(4)
    for seed, temperature in ((1, 0.5), (2, 0.9)):
        sampling = SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
        slots.join(Slot(2), stream_of(seed, 0), sampling)
        lots = slots.lots([Slot(2)], [7])
        assert lots.whole.tolist() == [[0, *row_key(stream_of(seed, 0), 7), NO_TOP_K]]
        assert lots.real.tolist() == [[pytest.approx(temperature), 1.0, 0.0]]
        slots.leave(Slot(2))
        assert not slots.hold([Slot(2)])


def test_a_runner_draws_the_same_tokens_with_and_without(
    model_of: Callable[[str], Path],
) -> None:
    """Steps with a mask, or with somebody who wants log-probabilities, take the way of all."""
    prompts = [[5, 9, 2], [7, 7], [1, 2, 3, 4, 5]]
    found, races = [], []
    for is_fast in (True, False):
        runner = make_runner(model_of("llama"))
        race = PlainRace(VOCAB_SIZE)
        if is_fast:
            runner._sampler._fast_race = race
        found.append(drawn(runner, prompts))
        races.append(race.num_draws)
    assert found[0] == found[1]
    assert races[0] > 0
    assert races[1] == 0


def drawn(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of each step: two sequences draw; then one with log-probabilities comes too."""
    sampling = SamplingParams(max_tokens=50, temperature=1.3, seed=3)
    out = []
    joins = tuple(
        joined(i, [2 * i, 2 * i + 1], len(prompts[i]), sampling=replace(sampling, seed=i))
        for i in range(2)
    )
    chunks = tuple(chunk(i, 0, prompts[i]) for i in range(2))
    batches = [Batch(step=0, joined=joins, chunks=chunks)]
    for step in range(1, 4):
        chunks = tuple(chunk(i, len(prompts[i]) + step - 1, Carried()) for i in range(2))
        batches.append(Batch(step=step, chunks=chunks))
    bits = bytes([0xFF] * (-(-VOCAB_SIZE // 8)))
    chunks = tuple(chunk(i, len(prompts[i]) + 3, Carried()) for i in range(2))
    batches.append(Batch(step=4, chunks=chunks, masks=(TokenMask(slot=Slot(0), bits=bits),)))
    third = joined(2, [8, 9], 5, sampling=replace(sampling, logprobs=1))
    chunks = (
        *(chunk(i, len(prompts[i]) + 4, Carried()) for i in range(2)),
        chunk(2, 0, prompts[2]),
    )
    batches.append(Batch(step=5, joined=(third,), chunks=chunks))
    for batch in batches:
        output = runner.launch(batch).wait()
        out.append([each.tokens[0] for each in output.sampled])
    return out
