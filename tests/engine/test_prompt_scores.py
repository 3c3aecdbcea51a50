"""Log-probabilities of prompt tokens are those of transformers, however the prompt is cut."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.request import PromptLogprob
from pdserve.engine.batch import Batch, Chunk, Slot
from pdserve.engine.parallel import TpGroup
from pdserve.engine.runner import ModelRunner
from tests.engine.families import FAMILIES, VOCAB_SIZE, reference_prompt_logprobs
from tests.engine.runs import GREEDY, chunk, joined, make_runner
from tests.engine.test_tensor_parallel import on_ranks

ModelOf = Callable[[str], Path]
PROMPT = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(70)]
NUM_TOP = 5
CUTS = [[70], [1, 69], [69, 1], [16, 16, 38], [1] * 70, [65, 5]]


def scores(
    runner: ModelRunner,
    prompt: Sequence[int],
    lengths: Sequence[int],
    num_top: int = NUM_TOP,
    beside: Sequence[int] = (),
) -> list[PromptLogprob]:
    """What the runner tells of a prompt in slot 0, in chunks of these lengths; ``beside`` is the
    prompt of another slot, which asks for nothing, a token a step.
    """
    asks = replace(GREEDY, prompt_logprobs=num_top)
    num_blocks = runner.layout.num_blocks_for(len(prompt))
    joins = [joined(0, range(num_blocks), len(prompt), sampling=asks)]
    if beside:
        other = range(num_blocks, num_blocks + runner.layout.num_blocks_for(len(beside)))
        joins.append(joined(1, other, len(beside)))
    found: list[PromptLogprob] = []
    at = 0
    for step, length in enumerate(lengths):
        last = at + length == len(prompt)
        chunks: list[Chunk] = []
        if step < len(beside):
            is_end = step + 1 == len(beside)
            chunks.append(chunk(1, step, beside[step : step + 1], num_samples=int(is_end)))
        chunks.append(chunk(0, at, prompt[at : at + length], num_samples=int(last)))
        batch = Batch(step=step, joined=tuple(joins) if step == 0 else (), chunks=tuple(chunks))
        output = runner.launch(batch).wait()
        for item in output.scored:
            assert item.chunk == len(chunks) - 1
            assert item.start == len(found) + 1
            found += item.logprobs
        at += length
    left = (Slot(0), Slot(1)) if beside else (Slot(0),)
    runner.launch(Batch(step=len(lengths), left=left))
    return found


def check(found: Sequence[PromptLogprob], expected: torch.Tensor, prompt: Sequence[int]) -> None:
    assert len(found) == len(prompt) - 1
    for item, row, token in zip(found, expected, prompt[1:], strict=True):
        assert item.logprob == pytest.approx(float(row[token]), abs=1e-4)
        near = (row >= row[token] - 1e-4).sum(), (row > row[token] + 1e-4).sum() + 1
        assert int(near[1]) <= item.rank <= int(near[0])
        best = [value for _, value in item.top]
        assert best == sorted(best, reverse=True)
        assert best == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=1e-4)
        for token_id, value in item.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)


@pytest.mark.parametrize("lengths", CUTS, ids=lambda lengths: f"{len(lengths)} chunks")
def test_each_cut_of_a_prompt_gives_what_transformers_gives(
    model_of: ModelOf, lengths: list[int]
) -> None:
    expected = reference_prompt_logprobs(model_of("llama"), PROMPT)
    check(scores(make_runner(model_of("llama")), PROMPT, lengths), expected, PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_what_transformers_gives(model_of: ModelOf, family: str) -> None:
    expected = reference_prompt_logprobs(model_of(family), PROMPT)
    check(scores(make_runner(model_of(family)), PROMPT, [40, 30]), expected, PROMPT)


def test_others_in_the_step_change_nothing_and_are_told_nothing(model_of: ModelOf) -> None:
    expected = reference_prompt_logprobs(model_of("llama"), PROMPT)
    runner = make_runner(model_of("llama"))
    found = scores(runner, PROMPT, [16, 16, 38], beside=[5, 6, 7])
    check(found, expected, PROMPT)
    none_of_the_top = scores(make_runner(model_of("llama")), PROMPT, [70], num_top=0)
    assert [item.top for item in none_of_the_top] == [()] * 69


def test_the_ranks_of_a_group_tell_the_same(model_of: ModelOf, tmp_path: Path) -> None:
    directory = model_of("llama")

    def work(group: TpGroup) -> list[PromptLogprob]:
        runner = make_runner(directory, group, tp_size=2, tp_rank=group.rank)
        return scores(runner, PROMPT, [33, 37])

    first, second = on_ranks(2, tmp_path / "store", work)
    assert first == second
    check(first, reference_prompt_logprobs(directory, PROMPT), PROMPT)


@pytest.mark.model
def test_the_real_model_tells_what_transformers_tells(smollm2_dir: Path) -> None:
    prompt = [random.Random(5).randrange(49152) for _ in range(100)]
    runner = make_runner(smollm2_dir, max_model_len=256, kv_cache_bytes=1 << 26)
    check(scores(runner, prompt, [70, 30]), reference_prompt_logprobs(smollm2_dir, prompt), prompt)
