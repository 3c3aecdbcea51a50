"""The runner keeps to the contract of a batch: deltas, order, carried tokens, lone errors."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError, RankError
from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import Batch, BlockCopy, Carried, Chunk, Joined, Slot
from pdserve.engine.runner import ModelRunner
from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import GREEDY, chunk, greedy, joined, make_runner

ModelOf = Callable[[str], Path]
PROMPTS = [[random.Random(n).randrange(VOCAB_SIZE) for _ in range(n)] for n in (33, 1, 50, 16)]
NUM_TOKENS = 5


@pytest.fixture(scope="module")
def runner(model_of: ModelOf) -> ModelRunner:
    return make_runner(model_of("llama"))


@pytest.fixture(scope="module")
def answers(runner: ModelRunner) -> list[list[int]]:
    return [greedy(runner, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]


def tokens_of(runner: ModelRunner, batch: Batch) -> list[tuple[int, ...]]:
    return [sampled.tokens for sampled in runner.launch(batch).wait().sampled]


@pytest.mark.parametrize("chunk_len", [1, 7, 8, 16, 40])
def test_chunks_of_any_length_give_the_tokens_of_the_whole(
    chunk_len: int, runner: ModelRunner, answers: list[list[int]]
) -> None:
    assert greedy(runner, PROMPTS, NUM_TOKENS, chunk_len=chunk_len) == answers


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_the_block_size_does_not_matter(
    block_size: int, backend: str, model_of: ModelOf, answers: list[list[int]]
) -> None:
    other = make_runner(model_of("llama"), block_size=block_size, attention_backend=backend)
    assert greedy(other, PROMPTS, NUM_TOKENS, chunk_len=20) == answers


def test_blocks_may_come_with_each_chunk(runner: ModelRunner, answers: list[list[int]]) -> None:
    prompt = PROMPTS[0]  # 33 tokens: three blocks
    joins: tuple[Joined, ...] = (joined(3, [9], len(prompt)),)
    parts = [(0, prompt[:16], ()), (16, prompt[16:], (4, 7))]
    out: list[tuple[int, ...]] = []
    for step, (start, tokens, blocks) in enumerate(parts):
        part = chunk(3, start, tokens, num_samples=step)
        part = part._replace(new_blocks=tuple(map(BlockId, blocks)))
        out += tokens_of(runner, Batch(step=step, joined=joins, chunks=(part,)))
        joins = ()
    out += tokens_of(runner, Batch(step=2, chunks=(chunk(3, 33, Carried()),)))
    runner.launch(Batch(step=3, left=(Slot(3),)))
    assert [t for (t,) in out] == answers[0][:2]


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_a_prompt_goes_on_after_blocks_that_another_one_has_filled(
    backend: str, model_of: ModelOf, answers: list[list[int]]
) -> None:
    runner = make_runner(model_of("llama"), attention_backend=backend)
    prompt = PROMPTS[2]  # 50 tokens: three full blocks
    first = Batch(step=0, joined=(joined(0, range(4), 50),), chunks=(chunk(0, 0, prompt),))
    assert tokens_of(runner, first) == [(answers[2][0],)]
    out: list[int] = []
    joins: tuple[Joined, ...] = (joined(1, [0, 1, 7, 9], 50), joined(2, [5, 6, 8], 33))
    parts: list[tuple[int, list[int] | Carried]] = [(32, prompt[32:])]
    parts += [(50 + n, Carried()) for n in range(NUM_TOKENS - 1)]
    for step, (start, tokens) in enumerate(parts, 1):
        chunks = [chunk(1, start, tokens)]
        chunks += [chunk(2, 0, PROMPTS[0])] if step == 1 else []  # a cold one in the same step
        batch = Batch(step=step, joined=joins, chunks=tuple(chunks))
        out += tokens_of(runner, batch)[0]
        joins = ()
    assert out == answers[2]


def test_a_slot_may_be_left_and_joined_in_one_batch(
    runner: ModelRunner, answers: list[list[int]]
) -> None:
    first = Batch(step=0, joined=(joined(0, [1, 2, 3], 33),), chunks=(chunk(0, 0, PROMPTS[0]),))
    second = Batch(
        step=1, left=(Slot(0),), joined=(joined(0, [3], 16),), chunks=(chunk(0, 0, PROMPTS[3]),)
    )
    assert tokens_of(runner, first) == [(answers[0][0],)]
    assert tokens_of(runner, second) == [(answers[3][0],)]
    runner.launch(Batch(step=2, left=(Slot(0),)))


def test_a_fork_shares_full_blocks_and_copies_the_last(
    runner: ModelRunner, answers: list[list[int]]
) -> None:
    prompt = PROMPTS[0]
    sampling = replace(GREEDY, temperature=1.0, seed=5)
    start = Batch(
        step=0,
        joined=(joined(0, [0, 1, 2], 33, choices=(0, 1, 2), sampling=sampling),),
        chunks=(chunk(0, 0, prompt, num_samples=3),),
    )
    (tokens,) = tokens_of(runner, start)
    assert len(tokens) == 3
    assert len(set(tokens)) > 1  # each choice has noise of its own
    fork = Batch(
        step=1,
        joined=(joined(1, [0, 1, 8], 33, choices=(1,), sampling=sampling),),
        copies=(BlockCopy(source=BlockId(2), destination=BlockId(8)),),
        chunks=(chunk(0, 33, tokens[:1]), chunk(1, 33, tokens[1:2])),
    )
    found = tokens_of(runner, fork)
    runner.launch(Batch(step=2, left=(Slot(0), Slot(1))))
    for choice, sampled in enumerate(found):  # the same without a fork
        alone = Batch(
            step=0,
            joined=(joined(0, [4, 5, 6], 33, choices=(choice,), sampling=sampling),),
            chunks=(chunk(0, 0, [*prompt, tokens[choice]]),),
        )
        assert tokens_of(runner, alone) == [sampled]
        runner.launch(Batch(step=1, left=(Slot(0),)))


def test_a_prompt_may_have_more_choices_than_there_are_slots(runner: ModelRunner) -> None:
    choices = range(2 * runner.config.max_num_seqs + 3)
    sampling = replace(GREEDY, temperature=1.0, seed=6)

    def first_tokens(choices: Sequence[int]) -> tuple[int, ...]:
        batch = Batch(
            step=0,
            joined=(joined(0, [0, 1, 2], 33, choices=tuple(choices), sampling=sampling),),
            chunks=(chunk(0, 0, PROMPTS[0], num_samples=len(choices)),),
        )
        (tokens,) = tokens_of(runner, batch)
        runner.launch(Batch(step=1, left=(Slot(0),)))
        return tokens

    assert first_tokens(choices) == sum(map(first_tokens, ([choice] for choice in choices)), ())


def test_noise_is_that_of_the_request_wherever_it_is_batched(runner: ModelRunner) -> None:
    sampling = replace(GREEDY, temperature=1.5, seed=11)
    alone = joined(5, [20, 21, 22], 33, sampling=sampling)
    others = (joined(0, [0], 1), joined(1, [1, 2, 3, 4], 50))
    fill = (chunk(0, 0, PROMPTS[1]), chunk(1, 0, PROMPTS[2]))
    prompt = chunk(5, 0, PROMPTS[0])
    first = tokens_of(runner, Batch(step=0, joined=(alone,), chunks=(prompt,)))
    runner.launch(Batch(step=1, left=(Slot(5),)))
    batch = Batch(step=2, joined=(*others, alone), chunks=(*fill, prompt))
    assert tokens_of(runner, batch)[-1:] == first
    runner.launch(Batch(step=3, left=(Slot(0), Slot(1), Slot(5))))


def test_logprobs_come_with_the_first_token_too(
    runner: ModelRunner, answers: list[list[int]]
) -> None:
    sampling = replace(GREEDY, logprobs=2)
    join = joined(0, [0, 1, 2], 33, sampling=sampling)
    batch = Batch(step=0, joined=(join,), chunks=(chunk(0, 0, PROMPTS[0]),))
    (sampled,) = runner.launch(batch).wait().sampled
    (logprobs,) = sampled.logprobs
    assert logprobs.top[0] == (answers[0][0], logprobs.logprob)
    runner.launch(Batch(step=1, left=(Slot(0),)))


def test_steps_may_be_launched_before_earlier_ones_are_waited_for(
    runner: ModelRunner, answers: list[list[int]]
) -> None:
    join = joined(0, [0, 1, 2], 33)
    first = Batch(step=0, joined=(join,), chunks=(chunk(0, 0, PROMPTS[0]),))
    second = Batch(step=1, chunks=(chunk(0, 33, Carried()),))
    pending = [runner.launch(first), runner.launch(second)]
    outputs = [step.wait() for step in pending]
    assert [output.step for output in outputs] == [0, 1]
    assert [output.sampled[0].tokens[0] for output in outputs] == answers[0][:2]
    runner.launch(Batch(step=2, left=(Slot(0),)))


def bad_batches() -> dict[str, Batch]:
    good = joined(0, [0, 1], 4)
    tokens = [1, 2, 3, 4]
    new_block = Chunk(slot=Slot(0), start=0, tokens=(1,), new_blocks=(BlockId(-1),), num_samples=0)
    return {
        "no sequence is in slot 2": Batch(step=9, chunks=(chunk(2, 0, tokens),)),
        "no sequence is in slot 3 to leave it": Batch(step=9, left=(Slot(3),)),
        "slot 7 is taken": Batch(step=9, joined=(joined(7, [5], 4),)),
        "slot 8 is taken or not a slot": Batch(step=9, joined=(joined(8, [5], 4),)),
        "a block is not one of": Batch(step=9, joined=(joined(0, [9999], 4),)),
        "not one of": Batch(step=9, joined=(good,), chunks=(new_block,)),
        "no room for 4 tokens at 30": Batch(step=9, joined=(good,), chunks=(chunk(0, 30, tokens),)),
        "no room for 0 tokens": Batch(step=9, joined=(good,), chunks=(chunk(0, 0, []),)),
        "a token is not one of 199": Batch(step=9, joined=(good,), chunks=(chunk(0, 0, [1, 199]),)),
        "at most 128 tokens": Batch(
            step=9, joined=(joined(0, range(9), 4),), chunks=(chunk(0, 127, [1, 1]),)
        ),
    }


@pytest.mark.parametrize("reason", bad_batches())
def test_an_impossible_batch_fails_alone(
    reason: str, runner: ModelRunner, answers: list[list[int]]
) -> None:
    start = Batch(step=0, joined=(joined(7, [10, 11, 12], 33),), chunks=(chunk(7, 0, PROMPTS[0]),))
    out = tokens_of(runner, start)
    with pytest.raises(RankError, match=reason):
        runner.launch(bad_batches()[reason])
    out += tokens_of(runner, Batch(step=1, chunks=(chunk(7, 33, Carried()),)))
    runner.launch(Batch(step=2, left=(Slot(7),)))
    assert [t for (t,) in out] == answers[0][:2]


def test_a_poisoned_block_shows_only_where_it_is_read(
    runner: ModelRunner, answers: list[list[int]]
) -> None:
    runner.kv.poison([BlockId(b) for b in range(runner.num_blocks)])
    assert greedy(runner, PROMPTS, NUM_TOKENS) == answers  # all it reads it has written
    join, prompt = joined(0, [0, 1, 2], 33), chunk(0, 0, PROMPTS[0])
    runner.launch(Batch(step=0, joined=(join,), chunks=(prompt,)))
    runner.kv.poison([BlockId(1)])
    wrong = tokens_of(runner, Batch(step=1, chunks=(chunk(0, 33, Carried()),)))
    runner.launch(Batch(step=2, left=(Slot(0),)))
    assert wrong != [(answers[0][1],)]


def test_warming_up_leaves_the_runner_empty(model_of: ModelOf, answers: list[list[int]]) -> None:
    fresh = make_runner(model_of("llama"))
    fresh.warm_up()
    assert greedy(fresh, PROMPTS, NUM_TOKENS) == answers


def test_too_little_memory_for_one_block_is_refused(model_of: ModelOf) -> None:
    with pytest.raises(ConfigError, match="1000 bytes hold no block"):
        make_runner(model_of("llama"), kv_cache_bytes=1000)


def test_blocks_start_on_512_byte_borders(model_of: ModelOf) -> None:
    odd = make_runner(model_of("llama"), block_size=3)
    kv = odd.kv.tensor
    assert all(kv[b].data_ptr() % 512 == 0 for b in (0, 1, odd.num_blocks - 1))
    assert kv.shape == (odd.num_blocks, 2, 2, 2, 3, 16)
    k_pages, v_pages = odd.kv.page_view(1)
    assert k_pages.shape == v_pages.shape == (odd.num_blocks + 1, 3, 2, 16)  # the spare block too
    assert k_pages[5, 2, 1].data_ptr() == kv[5, 1, 1, 0, 2].data_ptr()
    assert v_pages[5, 2, 1].data_ptr() == kv[5, 1, 1, 1, 2].data_ptr()


@pytest.mark.model
@pytest.mark.parametrize("chunk_len", [64, 2048])
def test_the_small_model_answers_as_the_golden_file_says(chunk_len: int, smollm2_dir: Path) -> None:
    runner = make_runner(smollm2_dir, max_model_len=2048, kv_cache_bytes=1 << 28)
    cases = json.loads((Path(__file__).parents[1] / "data" / "golden_engine.json").read_text())
    prompts = [case["prompt_token_ids"] for case in cases]
    longest = max(len(case["output_token_ids"]) for case in cases)
    for case, found in zip(
        cases, greedy(runner, prompts, longest, chunk_len=chunk_len), strict=True
    ):
        expected = case["output_token_ids"]
        sure = next((i for i, m in enumerate(case["margins"]) if m < 0.002), len(expected))
        assert found[:sure] == expected[:sure]
