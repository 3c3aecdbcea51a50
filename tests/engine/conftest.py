"""Fixtures of the engine's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
