"""After a rank's warm-up no request pays for a kernel's compilation."""

import random
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Slot
from tests.engine.families import VOCAB_SIZE
from tests.engine.runs import GREEDY, chunk, joined, make_runner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PICKS = "pdserve.engine.slot_picks_triton"
MODULES = (
    "pdserve.engine.attention.triton_kernels",
    "pdserve.engine.kernels.triton_kernels",
    "pdserve.engine.sampling_race_triton",
    PICKS,
)
WAYS = (
    GREEDY,
    SamplingParams(max_tokens=9, seed=3),
    SamplingParams(max_tokens=9, seed=3, top_p=0.9),
    SamplingParams(max_tokens=9, seed=3, top_k=7),
    SamplingParams(max_tokens=9, seed=3, logprobs=2),
    SamplingParams(max_tokens=9, seed=3, logit_bias=((1, 2.0),)),
)


def num_compiled() -> dict[str, int]:
    """Variants of each kernel that this process has."""
    return {
        f"{module}.{name}": sum(len(caches[0]) for caches in kernel.device_caches.values())
        for module in MODULES
        for name, kernel in vars(import_module(module)).items()
        if hasattr(kernel, "device_caches")
    }


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_steps_of_any_size_find_their_kernels_compiled(
    cuda_graphs: bool, model_of: Callable[[str], Path]
) -> None:
    runner = make_runner(
        model_of("llama"),
        device="cuda:0",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        cuda_graphs=cuda_graphs,
    )
    runner.warm_up()
    before = num_compiled()
    assert before[f"{PICKS}._races"] >= 1
    draw = random.Random(1)
    step = 0
    for first, count in ((0, 1), (0, 2), (1, 3), (0, 4), (0, 5), (4, 1), (5, 1), (2, 7), (0, 8)):
        lengths = [draw.randint(1, 30) for _ in range(count)]
        joins = tuple(
            joined(
                i,
                range(4 * i, 4 * i + 4),
                n,
                sampling=replace(WAYS[(first + i) % len(WAYS)], seed=i),
            )
            for i, n in enumerate(lengths)
        )
        prompts = tuple(
            chunk(i, 0, [draw.randrange(VOCAB_SIZE) for _ in range(n)])
            for i, n in enumerate(lengths)
        )
        decodes = [
            tuple(chunk(i, n + later, Carried()) for i, n in enumerate(lengths))
            for later in range(2)
        ]
        batches = [
            Batch(step=step, joined=joins, chunks=prompts),
            *(Batch(step=step + 1 + i, chunks=chunks) for i, chunks in enumerate(decodes)),
            Batch(step=step + 3, left=tuple(Slot(i) for i in range(count))),
        ]
        for batch in batches:
            runner.launch(batch).wait()
        step += 4
    assert num_compiled() == before
