"""``pdserve models fetch NAME``."""

import argparse
import sys

from pdserve.models.catalog import CATALOG
from pdserve.models.fetch import fetch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=f"one of {', '.join(CATALOG)}")


def run(arguments: argparse.Namespace) -> int:
    """Fetch it if it is not there, and say where it is."""
    sys.stdout.write(f"{fetch(arguments.name)}\n")
    return 0
