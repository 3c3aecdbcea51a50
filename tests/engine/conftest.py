"""Fixtures of the engine's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.families import save_model


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a family's tiny model, saved once a session."""
    saved: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in saved:
            saved[family] = save_model(family, tmp_path_factory.mktemp(family))
        return saved[family]

    return directory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine OpenMP's threads wait for each other longer than tiny models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
