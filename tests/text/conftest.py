"""Fixtures of the text tests: one tokenizer of each kind a session."""

import pytest

from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import KINDS, save


@pytest.fixture(scope="session")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        kind: Tokenizer(save(tmp_path_factory.mktemp("tokenizer"), make()))
        for kind, make in KINDS.items()
    }
