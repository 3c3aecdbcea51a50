"""``pdserve demo``: fetch the model, serve the cluster file, ask three questions, check, stop."""

import argparse
import sys
from pathlib import Path

from pdserve.cluster.console import Console
from pdserve.cluster.serve import cluster_file, prepare_environment
from pdserve.core.config_file import load_config
from pdserve.core.plugin import load_plugin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cluster_yaml", nargs="?", type=Path, help="as for `pdserve serve`; default: the same"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")


def run(arguments: argparse.Namespace) -> int:
    """0 when all three answers were right and came by the expected way."""
    config = load_config(cluster_file(arguments.cluster_yaml), arguments.set)
    prepare_environment(config)
    demonstrate = load_plugin("pdserve.cluster.demo.session:demonstrate")
    status = demonstrate(config, Console(sys.stdout))
    assert isinstance(status, int)
    return status
