"""``pdserve bench transfer`` between two processes on the CPU."""

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from pdserve.bench.transfer.ceiling import link_bytes_per_s
from pdserve.cli import main

SMALL = ["bench", "transfer", "--layers", "2", "--kv-heads", "2", "--head-size", "16"]


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """The bench sets its process up as that of a rank."""
    before = sys.getswitchinterval(), torch.get_num_threads()
    yield
    sys.setswitchinterval(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.parametrize(
    ("transport", "shapes"),
    [
        ("grpc", []),
        ("gloo", ["--tp", "2", "--to-tp", "1", "--to-block-size", "8"]),
        ("grpc", ["--to-tp", "4"]),
        ("grpc", ["--to-block-size", "32"]),
    ],
)
def test_a_row_for_each_size_with_the_bytes_that_arrived(
    transport: str, shapes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tokens", "5,40", "--rounds", "2", "--dtype", "float32", "--json"]
    assert main([*SMALL, "--transport", transport, *shapes, *sizes]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["transport"], found["link_gb_per_s"]) == (transport, None)
    assert [row["tokens"] for row in found["rows"]] == [5, 40]
    has_replicas = "4" in shapes
    assert {row["is_same"] for row in found["rows"]} == {None if has_replicas else True}
    assert all(row["mib"] > 0 and row["ms_p90"] >= row["ms"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--transport", "nccl"], "nccl needs GPUs, got 'cpu'"),
        (["--transport", "cuda_ipc", "--device", "cuda:0", "--to-device", "cpu"], "needs GPUs"),
        (["--device", "pigeon"], "'pigeon' is none"),
        (["--device", "meta"], "got 'meta', allowed are cpu and cuda:N"),
        (["--tokens", ""], "--tokens: got none"),
        (["--tp", "3"], "3 ranks cannot share 2"),
    ],
)
def test_what_can_not_be_measured_is_refused(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *options]) != 0
    assert problem in capsys.readouterr().err


def test_the_link_of_a_cpu_has_no_ceiling() -> None:
    assert link_bytes_per_s("cpu", "cpu") is None
