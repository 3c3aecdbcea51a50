"""``pdserve scale ROLE COUNT``: more nodes of a role, or fewer, which drain first and then end."""

import argparse
import json
import sys

from pdserve.cluster.admin import add_target_arguments, add_token_argument, give_order, target
from pdserve.cluster.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", help="prefill or decode")
    parser.add_argument("count", type=int, help="how many nodes of it there are to be")
    add_target_arguments(parser)
    add_token_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Says what has begun. Raises ConfigError for what cannot be, NoNodeError for no answer."""
    order = {"role": arguments.role, "count": arguments.count}
    answer = give_order(target(arguments), "/admin/scale", order)
    Console(sys.stdout).line(json.dumps(answer) if arguments.json else answer["message"])
    return 0
