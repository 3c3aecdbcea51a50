"""Loading a class or function by ``"module:name"``, the entries of our plug-in tables."""

import importlib
from typing import Any


def load_plugin(entry: str) -> Any:  # noqa: ANN401  (what an entry is, its table says)
    """Import the module and return what is named; ImportError where a library is missing."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)
