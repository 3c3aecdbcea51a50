"""The steps that memory is measured by are the largest that there will be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.rehearsal import largest_steps
from tests.engine.runs import engine_config, make_runner

ModelOf = Callable[[str], Path]

LIMITS: dict[str, Any] = {"block_size": 16, "max_model_len": 128, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "most_blocks", "longest"),
    [
        (48, 1000, 128),  # part of a sequence
        (200, 1000, 128),  # one whole and part of another
        (128, 1000, 128),
        (5, 1000, 128),  # less than a block
        (48, 5, 80),  # no cache holds a whole one
        (400, 2, 32),
    ],
)
def test_a_step_ends_where_the_longest_sequence_may_end(
    model_of: ModelOf, max_num_batched_tokens: int, most_blocks: int, longest: int
) -> None:
    config = engine_config(
        model_of("llama"), **LIMITS, max_num_batched_tokens=max_num_batched_tokens
    )
    rehearsal = largest_steps(config, most_blocks)
    ends = [[chunk.start + chunk.length for chunk in batch.chunks] for batch in rehearsal.batches]
    assert any(step and set(step) == {longest} for step in ends)
    assert max(map(max, filter(None, ends))) == longest
    most_tokens = min(max_num_batched_tokens, longest * config.max_num_seqs)
    sizes = [batch.num_tokens for batch in rehearsal.batches]
    assert [sizes[0], sizes[1]] == [most_tokens, most_tokens]


@pytest.mark.parametrize("max_num_batched_tokens", [48, 200, 5])
def test_the_largest_steps_run_in_their_few_blocks_and_leave_the_ranks_empty(
    model_of: ModelOf, max_num_batched_tokens: int
) -> None:
    limits = LIMITS | {"max_num_batched_tokens": max_num_batched_tokens}
    config = engine_config(model_of("llama"), **limits)
    rehearsal = largest_steps(config, 1000)
    num_bytes = rehearsal.num_blocks * config.layout.block_stride_bytes
    runner = make_runner(model_of("llama"), **limits, kv_cache_bytes=num_bytes)
    assert runner.num_blocks == rehearsal.num_blocks
    for _ in range(2):  # nothing is left to be in the way of the second time
        for batch in rehearsal.batches:
            runner.launch(batch).wait()


@pytest.mark.parametrize("max_num_batched_tokens", [1, 3, 4, 48])
def test_as_many_choices_are_sampled_as_a_step_samples_at_once(
    model_of: ModelOf, max_num_batched_tokens: int
) -> None:
    config = engine_config(
        model_of("llama"), **LIMITS, max_num_batched_tokens=max_num_batched_tokens
    )
    most = max(
        sum(chunk.num_samples for chunk in batch.chunks)
        for batch in largest_steps(config, 1000).batches
        if any(chunk.num_samples > 1 for chunk in batch.chunks)
    )
    assert most >= config.max_num_seqs
