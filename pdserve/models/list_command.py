"""``pdserve models list``."""

import argparse
import sys

from pdserve.core.environment import cache_dir
from pdserve.models.catalog import CATALOG
from pdserve.models.fetch import is_whole
from pdserve.models.hub_cache import whole_models
from pdserve.models.hub_repo import PREFIX


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace) -> int:
    """One line for each known model: name, where it comes from, where it is."""
    for name, model in CATALOG.items():
        directory = cache_dir() / "models" / name
        state = str(directory) if is_whole(directory, model) else "not fetched"
        source = f"{model.package} {model.version}, {model.wheel_bytes / 1e6:.0f} MB"
        sys.stdout.write(f"{name}  ({source})  {state}\n")
    for directory in whole_models(cache_dir()):
        repo_id = directory.parent.name.replace("--", "/", 1)
        sys.stdout.write(f"{PREFIX}{repo_id}  ({directory.name[:12]})  {directory}\n")
    return 0
