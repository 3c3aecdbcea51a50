"""Fixtures of the tests that need GPUs; they carry the markers `gpu` and `multigpu`."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def others_leave_memory() -> Iterator[None]:
    """For tests that take gigabytes, or go by what is left: of all workers one at a time."""
    with (Path(tempfile.gettempdir()) / "pdserve-gpu-memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
