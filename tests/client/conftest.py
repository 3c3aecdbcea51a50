"""The router's fixtures serve the client's tests too."""

from tests.router.conftest import (
    make_world,
    model_dir,
    shared_world,
    tokenizer,
    world,
)

__all__ = ["make_world", "model_dir", "shared_world", "tokenizer", "world"]
