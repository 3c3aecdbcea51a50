"""A router before fake nodes, as for the router's own tests, and what strangers use."""

from pathlib import Path

import pytest

from tests.router.conftest import make_world, model_dir, shared_world, tokenizer, world
from tests.text.tiny_models import byte_level, save

__all__ = ["make_world", "model_dir", "shared_world", "tokenizer", "world"]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny", byte_level())
