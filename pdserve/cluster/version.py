"""``pdserve version``."""

import argparse
import importlib.metadata
import sys

from pdserve.cluster.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace) -> int:
    Console(sys.stdout).line(f"pdserve {version()}")
    return 0


def version() -> str:
    """The installed version."""
    return importlib.metadata.version("pdserve")
