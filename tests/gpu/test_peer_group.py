"""Sums through peers' memory are the plain sum in the order of the ranks, bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.gpu.peer_ranks import Case, PeerRanks, peer_ranks

pytestmark = [pytest.mark.timeout(400)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [
    pytest.param((2, 1), id="two ranks on one GPU", marks=pytest.mark.gpu),
    pytest.param((2, 2), id="two ranks on two GPUs", marks=pytest.mark.multigpu),
    pytest.param((4, 2), id="four ranks on two GPUs", marks=pytest.mark.multigpu),
]
SHAPES = [(1, 1), (1, 4096), (5, 7), (8, 4096), (3, 4104), (65, 2048), (300, 4096), (2048, 1024)]


@pytest.fixture(scope="module", params=GROUPS)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PeerRanks]:
    size, num_gpus = request.param
    with peer_ranks(tmp_path_factory.mktemp("ranks") / "store", size, num_gpus) as started:
        yield started


def plain_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_plain_sums(ranks: PeerRanks, shape: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(kind="sum", shape=shape, dtype=dtype, seed=3)
    expected = plain_sum(case.parts(len(ranks.pipes)))
    for found in ranks(case):
        assert torch.equal(found[0], expected)


def test_numbers_are_gathered_too(ranks: PeerRanks) -> None:
    case = Case(kind="gather", shape=(1, 1), dtype=torch.int64, seed=4)
    expected = torch.cat(case.parts(len(ranks.pipes)), dim=1)
    assert all(torch.equal(found[0], expected) for found in ranks(case))


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, 130),
    width=st.integers(1, 300).map(lambda n: 8 * n),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["sum", "gather"]),
    seed=st.integers(0, 1000),
)
def test_any_sum_or_gather_is_right_after_any_other(
    ranks: PeerRanks, num_rows: int, width: int, dtype: torch.dtype, kind: str, seed: int
) -> None:
    case = Case(kind=kind, shape=(num_rows, width), dtype=dtype, seed=seed)
    parts = case.parts(len(ranks.pipes))
    expected = torch.cat(parts, dim=1) if kind == "gather" else plain_sum(parts)
    for found in ranks(case):
        assert torch.equal(found[0], expected)


@pytest.mark.parametrize("shape", [(1, 4096), (8, 4096), (512, 4096)])
def test_sums_in_a_graph_are_those_of_its_inputs_at_each_replay(
    ranks: PeerRanks, shape: tuple[int, int]
) -> None:
    case = Case(kind="graph", shape=shape, dtype=torch.bfloat16, seed=9)
    for found in ranks(case):
        for replay, total in enumerate(found):
            assert torch.equal(total, plain_sum(case.parts(len(ranks.pipes), replay)))


@pytest.mark.multigpu
def test_a_rank_that_waits_for_a_dead_peer_can_be_ended_and_its_gpu_used_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = Case(kind="sum", shape=(8, 4096), dtype=torch.bfloat16, seed=1)
    for _ in range(2):
        with peer_ranks(tmp_path_factory.mktemp("ranks") / "store", 2, 2) as ranks:
            expected = plain_sum(case.parts(2))
            assert all(torch.equal(found[0], expected) for found in ranks(case))
            ranks.processes[1].kill()
            ranks.processes[1].join(20)
            ranks.pipes[0].send(case)
            assert not ranks.pipes[0].poll(2)  # nothing wrong is answered
            ranks.processes[0].kill()
            ranks.processes[0].join(20)
            assert not ranks.processes[0].is_alive()
