"""``pdserve drain NODE``: nothing new goes to a node; it finishes what it holds, and stays."""

import argparse
import json
import sys

from pdserve.cluster.admin import add_target_arguments, add_token_argument, give_order, target
from pdserve.cluster.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", help="as `pdserve status` calls it, e.g. decode-0")
    parser.add_argument("--undo", action="store_true", help="let it take requests again")
    add_target_arguments(parser)
    add_token_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for a node that there is not, NoNodeError where nobody answers."""
    order = {"node": arguments.node, "undo": arguments.undo}
    answer = give_order(target(arguments), "/admin/drain", order)
    Console(sys.stdout).line(json.dumps(answer) if arguments.json else answer["message"])
    return 0
