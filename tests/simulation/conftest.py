"""A tokenizer for the routers of simulations."""

from pathlib import Path

import pytest

from tests.text.tiny_models import byte_level, save


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())
