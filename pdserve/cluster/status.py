"""``pdserve status``: asks the router of a running cluster, found through its run file.

Needs neither Ray nor the model; answers within a second or says why it cannot.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.cluster.console import Console
from pdserve.cluster.run_file import RunRecord, run_folder, running
from pdserve.core.errors import ConfigError, NoNodeError

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="of several clusters that run here, the one to ask")
    parser.add_argument("--url", help="ask the router at this address, e.g. http://host:8000")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Raises NoNodeError where nobody answers, ConfigError where many could."""
    url = arguments.url or _url(_chosen(running(run_folder()), arguments.name))
    status = ask(url)
    console = Console(sys.stdout)
    if arguments.json:
        console.line(json.dumps(status, indent=2))
        return 0
    console.line(f"{url}: {status['state']}" + _because(status.get("reason")))
    for line in table(status):
        console.line(line)
    return 0


def ask(url: str) -> dict[str, Any]:
    """The router's own words. Raises NoNodeError."""
    # No proxy: a router's admin service is for its own network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/admin/status", timeout=TIMEOUT_S) as answer:
            status = json.load(answer)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoNodeError(f"no router answers at {url}: {reason}") from error
    if not isinstance(status, dict) or "nodes" not in status:
        raise NoNodeError(f"{url} is no pdserve router")
    return status


def table(status: Mapping[str, Any]) -> Iterable[str]:
    """For people: a line for each node, and where requests went."""
    rows = [("node", "blocks free", "running", "waiting", "ranks (pid)")]
    for node in status["nodes"]:
        ranks = ", ".join(f"{rank['pid']}@{rank['host']}" for rank in node["ranks"])
        blocks = f"{_shown(node['free_blocks'])}/{_shown(node['total_blocks'])}"
        counts = (_shown(node["running"]), _shown(node["waiting"]))
        rows.append((node["name"], blocks, *counts, ranks or "not connected"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
    routes = ", ".join(f"{count} {route}" for route, count in status["routes"].items())
    yield f"routes: {routes}"


def _chosen(records: list[RunRecord], name: str | None) -> RunRecord:
    """The cluster to ask."""
    if name is not None:
        records = [record for record in records if record.name == name]
    if not records:
        raise NoNodeError(f"no cluster {f'named {name!r} ' if name else ''}runs on this machine")
    if len(records) > 1:
        names = "\n".join(f"  {record.name}  {record.http_url or 'starting'}" for record in records)
        raise ConfigError(f"several clusters run here; choose one by --name:\n{names}")
    return records[0]


def _url(record: RunRecord) -> str:
    if record.http_url is None:
        raise NoNodeError(f"cluster {record.name!r} is still starting; its logs: {record.log_dir}")
    return record.http_url


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _shown(count: int | None) -> str:
    return "–" if count is None else str(count)
