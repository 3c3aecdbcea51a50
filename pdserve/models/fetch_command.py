"""``pdserve models fetch NAME``."""

import argparse
import sys

from pdserve.core.errors import ModelNotFoundError
from pdserve.models.catalog import CATALOG
from pdserve.models.fetch import fetch, fetch_hub_model
from pdserve.models.hub_repo import hub_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", help=f"one of {', '.join(CATALOG)}, or a Hugging Face hub id: [hf:]ORG/NAME"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub's model (default main)")


def run(arguments: argparse.Namespace) -> int:
    """Fetch it if it is not there, and say where it is. A hub's branch is followed."""
    model = hub_model(arguments.name, arguments.revision)
    if model is not None:
        directory = fetch_hub_model(model, refresh=True)
    elif arguments.revision is not None:
        raise ModelNotFoundError(f"--revision: {arguments.name!r} is no hub id (ORG/NAME)")
    else:
        directory = fetch(arguments.name)
    sys.stdout.write(f"{directory}\n")
    return 0
