"""Steps whose slots all pick from the logits as they lie sample what any step samples."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Joined, Slot, TokenMask
from pdserve.engine.noise import signed_64, stream_of
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import Sampler, SampleRow
from pdserve.engine.sampling_race import NO_TOP_K
from pdserve.engine.slot_picks import LINE_WORDS, SlotPicks, pick_likeliest, pick_on
from tests.engine.families import VOCAB_SIZE
from tests.engine.plain_picks import PlainPick, PlainRace
from tests.engine.runs import chunk, joined, make_runner

CPU = torch.device("cpu")
POSITIONS = st.integers(0, (1 << 31) - 1)


def with_picks(sampler: Sampler, vocab_size: int) -> PlainPick:
    """Give the sampler what it has on a GPU."""
    pick = PlainPick(vocab_size)
    sampler._pick = pick
    sampler._fast_race = PlainRace()
    return pick


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
def test_what_is_picked_is_what_is_sampled(rows, random) -> None:
    sampler = Sampler(max_num_seqs=16, vocab_size=40, device=CPU)
    plain = Sampler(max_num_seqs=16, vocab_size=40, device=CPU)
    with_picks(sampler, 40)
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
    sampler.prepare_picks()
    found = torch.full((len(rows),), -1)
    kept = torch.empty_like(logits)
    sampler.pick(logits, torch.tensor(slots), torch.tensor(positions), found, kept)
    assert torch.equal(kept, logits)
    for number, (slot, (sampling, _)) in enumerate(zip(slots, rows, strict=True)):
        is_bare = sampling.logprobs is None and not sampling.needs_history
        can_race = sampling.temperature == 0 or PlainRace().can_draw(sampling)
        assert sampler.picks([slot]) == (is_bare and can_race)
        if sampler.picks([slot]):
            assert found[number] == expected.tokens[number]
    for slot in slots:
        sampler.leave(slot)
        assert not sampler.picks([slot])


def test_a_slot_that_is_joined_again_is_told_of_anew() -> None:
    picks = SlotPicks(4, CPU)
    for seed, temperature in ((1, 0.5), (2, 0.9)):
        sampling = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.5, seed=seed)
        picks.draw(Slot(2), stream_of(seed, 0), sampling)
        picks.write()
        stream, top_k, *reals = struct.unpack("<qifff8x", picks.table[2].numpy().tobytes())
        assert (stream, top_k) == (signed_64(stream_of(seed, 0)), NO_TOP_K)
        assert reals == torch.tensor([temperature, 0.5, 0.0]).tolist()
        picks.leave(Slot(2))
        assert not picks.hold([Slot(2)])
    picks.take_likeliest(Slot(2))
    picks.write()
    assert not picks.table.any()
    assert picks.table.shape == (5, LINE_WORDS)


def test_who_takes_the_likeliest_where_nobody_drew_writes_nothing() -> None:
    picks = SlotPicks(4, CPU)
    picks.take_likeliest(Slot(1))
    assert not picks._unwritten
    picks.draw(Slot(3), 7, SamplingParams(max_tokens=1))
    assert picks._unwritten == {3}


def test_without_a_gpu_slots_take_the_likeliest_only() -> None:
    assert pick_on(CPU) is pick_likeliest
    sampler = Sampler(max_num_seqs=2, vocab_size=40, device=CPU)
    for slot, temperature in ((0, 0.0), (1, 1.0)):
        sampler.join(
            Joined(
                slot=Slot(slot),
                sampling=SamplingParams(max_tokens=1, temperature=temperature),
                choices=(0,),
                end_token_ids=(),
                prompt_len=3,
                history=(),
                blocks=(),
            )
        )
    assert sampler.picks([Slot(0)])
    assert not sampler.picks([Slot(1)])


def test_a_runner_draws_the_same_tokens_with_and_without(
    model_of: Callable[[str], Path],
) -> None:
    """Steps with a mask, or with somebody who wants log-probabilities, take the way of all."""
    prompts = [[5, 9, 2], [7, 7], [1, 2, 3, 4, 5]]
    picking, plain = make_runner(model_of("llama")), make_runner(model_of("llama"))
    pick = with_picks(picking._sampler, VOCAB_SIZE)
    assert drawn(picking, prompts) == drawn(plain, prompts)
    assert pick.num_steps == 4


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
