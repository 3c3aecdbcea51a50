"""A router before fake nodes, as for the router's own tests, and what strangers use."""

from tests.router.conftest import make_world, model_dir, shared_world, tokenizer, world

__all__ = ["make_world", "model_dir", "shared_world", "tokenizer", "world"]
