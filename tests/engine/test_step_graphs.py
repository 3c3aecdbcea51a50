"""Steps filled up to the sizes of graphs give what they give as they are; here without a GPU.

In place of CUDA's graphs stand objects that run again what a graph would replay.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention.interface import AttentionBackend, AttentionMetadata
from pdserve.engine.batch import Batch, Carried, Slot
from pdserve.engine.kernels.interface import Rope
from pdserve.engine.runner import ModelRunner
from pdserve.engine.step_graphs import StepGraphs, chunk_shapes, decode_shapes
from pdserve.engine.step_input import StepShape
from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import GREEDY, chunk, greedy, joined, make_runner

ModelOf = Callable[[str], Path]
MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 128


class PlannedFromTensors:
    """``sdpa``, told of a step as a graph's backend is."""

    captures_chunks = True

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention
        self.plan, self.run = attention.plan, self._run

    def plan_decodes(self, positions: Tensor, block_tables: Tensor) -> None:
        ends = torch.arange(len(positions)) + 1
        self.plan_chunks(ends, positions + 1, ends - 1, positions, block_tables)

    def plan_chunks(
        self,
        ends: Tensor,
        context_lens: Tensor,
        owners: Tensor,
        positions: Tensor,
        block_tables: Tensor,
    ) -> None:
        lengths = torch.diff(ends, prepend=torch.tensor([0]))
        held = lengths > 0
        assert torch.equal(owners, torch.repeat_interleave(lengths))
        self.plan(
            AttentionMetadata(
                starts=tuple((context_lens - lengths)[held].tolist()),
                lengths=tuple(lengths[held].tolist()),
                positions=positions,
                block_tables=block_tables[held],
            )
        )

    def _run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        return self._attention.run(layer, q, k, v, rope)


class Replayed:
    """In place of a CUDA graph."""

    def __init__(self, graphs: StepGraphs, shape: StepShape, seen: list[StepShape]) -> None:
        self._graphs, self._shape, self._seen = graphs, shape, seen

    def replay(self) -> None:
        self._seen.append(self._shape)
        self._graphs._run(self._shape)


def with_graphs(runner: ModelRunner) -> list[StepShape]:
    """Give the runner graphs; the list of those that it replays."""
    runner._attention = PlannedFromTensors(runner._attention)
    shapes = decode_shapes(MAX_NUM_SEQS) + chunk_shapes(MAX_NUM_SEQS, MAX_MODEL_LEN, 1e6)
    graphs = StepGraphs(
        runner._filled_up,
        runner._end,
        shapes,
        vocab_size=VOCAB_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    seen: list[StepShape] = []
    graphs._graphs = {shape: Replayed(graphs, shape, seen) for shape in shapes}
    runner._graphs = graphs
    return seen


def small_runner(model_of: ModelOf) -> ModelRunner:
    return make_runner(
        model_of("llama"),
        attention_backend="sdpa",
        kernels="torch",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )


@pytest.mark.parametrize("chunk_len", [5, 13, 64])
def test_answers_are_those_of_steps_that_are_not_filled_up(
    chunk_len: int, model_of: ModelOf
) -> None:
    plain, filled = small_runner(model_of), small_runner(model_of)
    seen = with_graphs(filled)
    draw = random.Random(chunk_len)
    for count in (1, 3, 7):
        lengths = [draw.randint(1, 50) for _ in range(count)]
        prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]
        seen.clear()
        expected = greedy(plain, prompts, 5, chunk_len=chunk_len)
        assert greedy(filled, prompts, 5, chunk_len=chunk_len) == expected
        assert len(seen) >= 4
        assert any(shape.has_single_tokens for shape in seen)


def test_a_graph_writes_nothing_but_the_steps_own_blocks_and_tokens(model_of: ModelOf) -> None:
    runner = small_runner(model_of)
    with_graphs(runner)
    runner.kv.tensor.fill_(5.0)
    prompt = [7] * 20
    first = Batch(step=0, joined=(joined(3, [4, 9], 20),), chunks=(chunk(3, 0, prompt),))
    (token,) = runner.launch(first).wait().sampled[0].tokens
    others = [block for block in range(runner.num_blocks) if block not in (4, 9)]
    assert bool((runner.kv.tensor[others] == 5.0).all())
    assert runner._slots._last_tokens[:MAX_NUM_SEQS].tolist() == [0, 0, 0, token, 0, 0, 0, 0]


def test_who_samples_nothing_keeps_the_token_before(model_of: ModelOf) -> None:
    """It is only computed. Another way to sample comes after the graph."""
    plain, filled = small_runner(model_of), small_runner(model_of)
    seen = with_graphs(filled)
    drawn = replace(GREEDY, temperature=1.3, seed=4, logprobs=2)
    joins = (joined(0, [0, 1, 2], 33, sampling=drawn), joined(1, [3, 4], 20))
    batches = [
        Batch(
            step=0,
            joined=joins,
            chunks=(chunk(0, 0, [3] * 33), chunk(1, 0, [8] * 9, num_samples=0)),
        ),
        Batch(step=1, chunks=(chunk(1, 9, [8] * 11), chunk(0, 33, Carried()))),
        Batch(step=2, chunks=(chunk(1, 20, Carried()), chunk(0, 34, Carried()))),
        Batch(step=3, left=(Slot(0), Slot(1))),
    ]
    outputs = [[runner.launch(b).wait() for b in batches] for runner in (plain, filled)]
    assert [[s.tokens for s in out.sampled] for out in outputs[0]] == [
        [s.tokens for s in out.sampled] for out in outputs[1]
    ]
    assert outputs[1][1].sampled[1].logprobs
    assert len(seen) == 3
