"""A model cut over the ranks of a group computes what transformers computes."""

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.core.errors import ConfigError, RankError
from pdserve.engine.batch import Batch
from pdserve.engine.parallel import SoloGroup, TpGroup, start_tp_group
from tests.engine.families import FAMILIES, VOCAB_SIZE, reference_greedy, reference_logprobs
from tests.engine.runs import chunk, greedy, joined, logprobs_after, make_runner

ModelOf = Callable[[str], Path]
CPU = torch.device("cpu")
PROMPTS = [[random.Random(n).randrange(VOCAB_SIZE) for _ in range(n)] for n in (2, 33)]
TWO_KV_HEADS = sorted(FAMILIES.keys() - {"three_kv_heads", "one_kv_head"})
CUTS = [
    *((family, 2) for family in TWO_KV_HEADS),
    *((family, 4) for family in TWO_KV_HEADS),  # each KV head on two ranks
    ("three_kv_heads", 3),
    ("one_kv_head", 3),
]


def on_ranks(tp_size: int, store_path: Path, work: Callable[[TpGroup], Any]) -> list[Any]:
    """Run ``work`` on every rank of a gloo group, each in a thread: processes start slowly."""

    def rank(tp_rank: int) -> Any:
        group = start_tp_group(
            store_path=store_path, tp_rank=tp_rank, tp_size=tp_size, device=CPU, timeout_s=60
        )
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(tp_size) as pool:
        return list(pool.map(rank, range(tp_size)))


class CountingGroup(SoloGroup):
    """One rank, which counts the sums."""

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.numel(), "ranks do not wait for each other to sum nothing"
        self.num_sums += 1
        return x


def test_a_step_that_samples_nothing_sums_after_the_last_layers_kv_too(model_of: ModelOf) -> None:
    """A rank that is done speaks for all: their KV is handed over then."""
    group = CountingGroup()
    runner = make_runner(model_of("llama"), group)
    sums = []
    for step, num_samples in enumerate((0, 1)):
        before = group.num_sums
        part = chunk(0, 4 * step, (1, 2, 3, 4), num_samples=num_samples)
        joins = (joined(0, [0], 8),) if step == 0 else ()
        runner.launch(Batch(step=step, joined=joins, chunks=(part,))).wait()
        sums.append(group.num_sums - before)
    assert sums[0] == sums[1] - 1  # but for the last layer's MLP


@pytest.mark.parametrize(("family", "tp_size"), CUTS)
def test_ranks_together_are_transformers(
    family: str, tp_size: int, model_of: ModelOf, tmp_path: Path
) -> None:
    directory = model_of(family)

    def work(group: TpGroup) -> tuple[torch.Tensor, list[list[int]]]:
        runner = make_runner(directory, group, tp_size=tp_size, tp_rank=group.rank)
        return logprobs_after(runner, PROMPTS[-1]), greedy(runner, PROMPTS, 4)

    results = on_ranks(tp_size, tmp_path / "store", work)
    expected = reference_logprobs(directory, PROMPTS[-1])
    tokens = reference_greedy(directory, PROMPTS, 4)
    for found, found_tokens in results:
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-5)
        assert torch.equal(found, results[0][0])  # bitwise: ranks sample on their own
        assert found_tokens == tokens


@pytest.mark.parametrize("tp_size", [2, 4])
def test_dummy_weights_are_the_same_model_on_every_number_of_ranks(
    tp_size: int, model_of: ModelOf, tmp_path: Path
) -> None:
    def work(group: TpGroup) -> torch.Tensor:
        runner = make_runner(
            model_of("qwen2"), group, load_format="dummy", tp_size=group.size, tp_rank=group.rank
        )
        return logprobs_after(runner, PROMPTS[-1])

    whole = work(SoloGroup())
    assert whole.exp().max() < 0.9  # sane: no token takes everything
    for cut in on_ranks(tp_size, tmp_path / "store", work):
        torch.testing.assert_close(cut, whole, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "tp_size", "reason"),
    [
        ("llama", 3, "3 ranks cannot share 2 KV heads evenly"),
        ("llama", 8, "8 ranks cannot share 4 attention heads evenly"),
        ("one_kv_head", 5, "5 ranks cannot share 12 attention heads evenly"),
    ],
)
def test_uneven_cuts_are_refused_by_name(
    family: str, tp_size: int, reason: str, model_of: ModelOf
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_runner(model_of(family), tp_size=tp_size)


def test_gathered_columns_stand_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    def work(group: TpGroup) -> torch.Tensor:
        return group.all_gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * group.rank)

    for gathered in on_ranks(3, tmp_path / "store", work):
        assert gathered.tolist() == [[1, 2, 11, 12, 21, 22], [3, 4, 13, 14, 23, 24]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_bitwise_the_same_on_every_rank(dtype: torch.dtype, tmp_path: Path) -> None:
    def work(group: TpGroup) -> torch.Tensor:
        random_part = torch.Generator().manual_seed(group.rank)
        return group.all_reduce(torch.randn(7, 501, generator=random_part).to(dtype))

    first, *others = on_ranks(4, tmp_path / "store", work)
    assert all(torch.equal(first, other) for other in others)


def test_a_rank_that_nobody_meets_gives_up_by_name(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 of 2"):
        start_tp_group(
            store_path=tmp_path / "store", tp_rank=0, tp_size=2, device=CPU, timeout_s=0.5
        )


def reduce_until_it_fails(group: TpGroup) -> None:
    for _ in range(100):
        group.all_reduce(torch.ones(4))


def test_a_rank_that_is_gone_is_an_error_of_the_others_not_a_hang(tmp_path: Path) -> None:
    def work(group: TpGroup) -> str:
        if group.rank == 1:
            return "left"  # and closes the group
        with pytest.raises(RankError, match="rank 0"):
            reduce_until_it_fails(group)
        return "noticed"

    assert on_ranks(2, tmp_path / "store", work) == ["noticed", "left"]


RANK_PROCESS = """
import sys, pathlib, torch
from pdserve.engine.parallel import start_tp_group
group = start_tp_group(store_path=pathlib.Path(sys.argv[1]), tp_rank=int(sys.argv[2]), tp_size=2,
                       device=torch.device("cpu"), timeout_s=60)
assert group.all_reduce(torch.full((3,), group.rank + 1.0)).tolist() == [3.0, 3.0, 3.0]
group.close()
"""


def test_ranks_may_be_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK_PROCESS, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
