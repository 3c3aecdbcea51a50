"""Steps out of CUDA graphs give what steps without them give."""

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


@pytest.fixture(scope="module")
def with_graphs(model_of: ModelOf) -> ModelRunner:
    return runner_of(model_of("llama"), cuda_graphs=True)


@pytest.fixture(scope="module")
def without(model_of: ModelOf) -> ModelRunner:
    return runner_of(model_of("llama"), cuda_graphs=False)


def test_answers_do_not_depend_on_graphs(with_graphs: ModelRunner, without: ModelRunner) -> None:
    for count in (1, 2, 3, 7, 8, 13, 21):  # exactly a captured size, and between two
        assert greedy(with_graphs, prompts(count), NUM_TOKENS) == greedy(
            without, prompts(count), NUM_TOKENS
        )


@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
def test_nor_do_those_of_other_families(family: str, model_of: ModelOf) -> None:
    runners = [runner_of(model_of(family), cuda_graphs=graphs) for graphs in (True, False)]
    answers = [greedy(runner, prompts(7), NUM_TOKENS, chunk_len=20) for runner in runners]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("chunk_len", [5, 16, 60])
def test_answers_do_not_depend_on_graphs_of_chunks(
    chunk_len: int, with_graphs: ModelRunner, without: ModelRunner
) -> None:
    """Prompts of many lengths, and what is left of the longer ones, in one step."""
    for count in (1, 2, 4, 9):
        assert greedy(with_graphs, prompts(count), 6, chunk_len=chunk_len) == greedy(
            without, prompts(count), 6, chunk_len=chunk_len
        )


def test_many_short_prompts_are_one_graph_and_decode_in_another(
    with_graphs: ModelRunner, without: ModelRunner
) -> None:
    many = [prompt[:6] for prompt in prompts(20)]
    assert greedy(with_graphs, many, NUM_TOKENS) == greedy(without, many, NUM_TOKENS)


def test_a_prompt_joins_decoding_sequences_in_one_step(with_graphs: ModelRunner) -> None:
    runner = with_graphs
    first, second = prompts(2)
    alone = [greedy(runner, [prompt], 4)[0] for prompt in (first, second)]
    start = Batch(step=0, joined=(joined(0, range(8), len(first)),), chunks=(chunk(0, 0, first),))
    join = joined(1, range(8, 16), len(second))
    middle = len(second) // 2
    mixed = [
        Batch(
            step=1,
            joined=(join,),
            chunks=(
                chunk(1, 0, second[:middle], num_samples=0),
                chunk(0, len(first), Carried()),
            ),
        ),
        Batch(
            step=2,
            chunks=(chunk(0, len(first) + 1, Carried()), chunk(1, middle, second[middle:])),
        ),
        Batch(
            step=3,
            chunks=(
                chunk(1, len(second), Carried()),
                chunk(0, len(first) + 2, Carried()),
            ),
        ),
    ]
    outputs = [runner.launch(batch).wait().sampled for batch in (start, *mixed)]
    tokens = [[sampled.tokens[0] for sampled in output] for output in outputs]
    assert [tokens[0][0], tokens[1][0], tokens[2][0], tokens[3][1]] == alone[0]
    assert [tokens[2][1], tokens[3][0]] == alone[1][:2]
    runner.launch(Batch(step=4, left=(Slot(0), Slot(1))))


def test_a_small_step_is_one_launch_of_a_graph(
    with_graphs: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = with_graphs
    prompt = prompts(1)[0] + [1]

    def never(*args: object) -> None:
        raise AssertionError("the model ran outside its graph")

    monkeypatch.setattr(runner._model, "forward", never)
    start = joined(0, range(6), len(prompt))
    assert runner.launch(Batch(step=0, joined=(start,), chunks=(chunk(0, 0, prompt),))).wait()
    step = Batch(step=1, chunks=(chunk(0, len(prompt), Carried()),))
    assert len(runner.launch(step).wait().sampled) == 1
    runner.launch(Batch(step=2, left=(Slot(0),)))


def test_replays_leave_other_blocks_alone(with_graphs: ModelRunner) -> None:
    """What only fills a graph up is written to the spare block."""
    runner = with_graphs
    many = prompts(9)  # runs in the graph of 16
    greedy(runner, many, 2)
    used = 9 * max(runner.layout.num_blocks_for(len(p) + 6) for p in many)
    runner.kv.tensor[used:].fill_(5.0)
    greedy(runner, many, 6)
    assert bool((runner.kv.tensor[used:] == 5.0).all())
