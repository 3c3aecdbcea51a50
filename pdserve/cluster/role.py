"""``pdserve role NODE ROLE``: a node drains, and goes on in the other role with its ranks."""

import argparse
import json
import sys

from pdserve.cluster.admin import add_target_arguments, add_token_argument, give_order, target
from pdserve.cluster.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", help="as `pdserve status` calls it, e.g. decode-0")
    parser.add_argument("role", help="prefill or decode")
    add_target_arguments(parser)
    add_token_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Says what has begun. Raises ConfigError for what cannot be, NoNodeError for no answer."""
    order = {"node": arguments.node, "role": arguments.role}
    answer = give_order(target(arguments), "/admin/role", order)
    Console(sys.stdout).line(json.dumps(answer) if arguments.json else answer["message"])
    return 0
