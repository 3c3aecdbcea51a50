"""Decode steps through our own attention kernel: in CUDA graphs the answers are the same."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import greedy, make_runner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ModelOf = Callable[[str], Path]


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_in_float32_graphs_change_no_token(kv_dtype: str, model_of: ModelOf) -> None:
    """A graph's filling is sequences more, so that the work is shared in other pieces."""
    runners = []
    for cuda_graphs in (True, False):
        runner = make_runner(
            model_of("llama"),
            device="cuda:0",
            dtype="float32",  # in 16 bits another size of a product may round another way
            kv_dtype=kv_dtype,
            attention_backend="triton",
            cuda_graphs=cuda_graphs,
            max_num_seqs=21,
        )
        runner.warm_up()
        runners.append(runner)
    for count in (1, 5, 20):
        in_graphs, outside = (greedy(runner, prompts(count), 20) for runner in runners)
        assert in_graphs == outside
