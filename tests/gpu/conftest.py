"""Fixtures of the tests that need GPUs; they carry the markers `gpu` and `multigpu`."""

from collections.abc import Iterator

import pytest
import torch

from pdserve.core.environment import set_up_gpu_rank
from tests.engine.conftest import model_of

__all__ = ["model_of"]


@pytest.fixture(autouse=True, scope="session")
def environment_of_a_rank() -> None:
    """As a rank process sets it up, before the first use of a GPU."""
    set_up_gpu_rank()


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    """Runners choose the thread's device; the next test starts with the first one."""
    yield
    torch.cuda.set_device(0)
