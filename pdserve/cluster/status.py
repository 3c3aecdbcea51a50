"""``pdserve status``: what the router of a running cluster says of its nodes."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.cluster.admin import (
    add_target_arguments,
    add_token_argument,
    get_status,
    target,
)
from pdserve.cluster.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    add_token_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Raises NoNodeError where nobody answers, ConfigError where many could."""
    at = target(arguments)
    status = get_status(at)
    console = Console(sys.stdout)
    if arguments.json:
        console.line(json.dumps(status, indent=2))
        return 0
    console.line(f"{at.url}: {status['state']}" + _because(status.get("reason")))
    for line in table(status):
        console.line(line)
    return 0


def table(status: Mapping[str, Any]) -> Iterable[str]:
    """For people: a line for each node, and where requests went."""
    rows = [("node", "role", "state", "blocks free", "running", "waiting", "ranks (pid)")]
    for node in status["nodes"]:
        ranks = ", ".join(f"{rank['pid']}@{rank['host']}" for rank in node["ranks"])
        blocks = f"{_shown(node['free_blocks'])}/{_shown(node['total_blocks'])}"
        counts = (_shown(node["running"]), _shown(node["waiting"]))
        names = (node["name"], node["role"], node["state"])
        rows.append((*names, blocks, *counts, ranks or "not connected"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
    for node in status["nodes"]:
        if node["reason"] and node["state"] != node["reason"]:
            yield f"{node['name']}: {node['reason']}"
        for trouble in node["troubles"]:
            yield f"{node['name']} leaves {trouble['node']} alone: {trouble['reason']}"
    routes = ", ".join(f"{count} {route}" for route, count in status["routes"].items())
    yield f"routes: {routes}"
    queues = ", ".join(map(_queue, status["queues"]))
    yield f"waiting at the router: {queues}"


def _queue(queue: Mapping[str, Any]) -> str:
    bound = f" of {queue['max_queued']}" if queue["max_queued"] is not None else ""
    since = f" (the oldest for {queue['oldest_s']:.1f} s)" if queue["num_waiting"] else ""
    return f"{queue['num_waiting']}{bound} {queue['prompt_class']}{since}"


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _shown(count: int | None) -> str:
    return "–" if count is None else str(count)
