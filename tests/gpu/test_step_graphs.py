"""Decode steps out of CUDA graphs give what steps without them give."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.batch import Batch, Carried, Slot
from pdserve.engine.runner import ModelRunner
from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import chunk, greedy, joined, make_runner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ModelOf = Callable[[str], Path]
NUM_TOKENS = 30


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 60))] for _ in range(count)]


def runner_of(model_dir: Path, *, cuda_graphs: bool) -> ModelRunner:
    runner = make_runner(
        model_dir,
        device="cuda:0",
        dtype="float32",  # in 16 bits another size of a product may round another way
        kv_dtype="bfloat16",
        attention_backend="flash_attn",
        cuda_graphs=cuda_graphs,
        max_num_seqs=21,
    )
    runner.warm_up()
    return runner


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_window"])
def test_answers_do_not_depend_on_graphs(family: str, model_of: ModelOf) -> None:
    with_graphs = runner_of(model_of(family), cuda_graphs=True)
    without = runner_of(model_of(family), cuda_graphs=False)
    for count in (1, 2, 3, 7, 8, 13, 21):  # exactly a captured size, and between two
        assert greedy(with_graphs, prompts(count), NUM_TOKENS) == greedy(
            without, prompts(count), NUM_TOKENS
        )


def test_a_decode_step_is_one_launch_of_a_graph(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(model_of("llama"), cuda_graphs=True)
    prompt = prompts(1)[0] + [1]
    runner.launch(
        Batch(step=0, joined=(joined(0, range(6), len(prompt)),), chunks=(chunk(0, 0, prompt),))
    )

    def never(*args: object) -> None:
        raise AssertionError("the model ran outside its graph")

    monkeypatch.setattr(runner._model, "forward", never)
    step = Batch(step=1, chunks=(chunk(0, len(prompt), Carried()),))
    assert len(runner.launch(step).wait().sampled) == 1
    runner.launch(Batch(step=2, left=(Slot(0),)))


def test_replays_leave_other_blocks_alone(model_of: ModelOf) -> None:
    """Rows that only fill a graph up repeat the first row: they write nothing of their own."""
    runner = runner_of(model_of("llama"), cuda_graphs=True)
    many = prompts(9)  # runs in the graph of 16
    greedy(runner, many, 2)
    used = 9 * max(runner.layout.num_blocks_for(len(p) + 6) for p in many)
    runner.kv.tensor[used:].fill_(5.0)
    greedy(runner, many, 6)
    assert bool((runner.kv.tensor[used:] == 5.0).all())
