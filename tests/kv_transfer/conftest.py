"""Worlds of nodes over each transport; every test must end with no thread of ours left."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from tests.kv_transfer.lending import CUDA_IPC, lending_in_process
from tests.kv_transfer.nodes import World, open_world


@pytest.fixture(params=["loopback", "grpc", "gloo", CUDA_IPC])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as stack:
        if request.param == CUDA_IPC:
            stack.enter_context(lending_in_process("threadless_lent_link"))
        yield stack.enter_context(open_world(request.param))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("kv-"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} is still running"


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Caches here are small: parallel regions would only wait for busy cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
