"""Loading a module, class or function by name: the entries of our plug-in tables."""

import importlib
from typing import Any


def load_plugin(entry: str) -> Any:  # noqa: ANN401  (what an entry is, its table says)
    """Import ``"module:name"`` and return the named thing.

    An ImportError of an optional library passes through.
    """
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)
