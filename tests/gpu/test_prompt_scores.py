"""Log-probabilities of prompt tokens on one GPU, also where the steps around them are graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.families import reference_prompt_logprobs
from tests.engine.runs import make_runner
from tests.engine.test_prompt_scores import PROMPT, check, scores

pytestmark = pytest.mark.gpu

GPU = "cuda:0"


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("lengths", [[70], [16, 16, 38], [1] * 70], ids=["1", "3", "70"])
def test_float32_is_transformers(
    model_of: Callable[[str], Path], lengths: list[int], cuda_graphs: bool
) -> None:
    runner = make_runner(model_of("llama"), device=GPU, cuda_graphs=cuda_graphs)
    runner.warm_up()
    expected = reference_prompt_logprobs(model_of("llama"), PROMPT)
    check(scores(runner, PROMPT, lengths, beside=[5, 6, 7][: len(lengths)]), expected, PROMPT)
