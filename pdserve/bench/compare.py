"""``pdserve bench compare``: the same requests on several settings of a cluster, side by side.

Each ``--case`` is a name and keys of the cluster file. Every round starts each case's cluster anew,
warms it, and offers it the same workload at the same rate; rounds take turns, so that a busy
machine slows all cases alike. ``--request-rate`` may be a share of what the first case can serve,
such as ``80%``: that is measured first, as its throughput with all requests offered at once.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdserve.bench.arguments import whole_number
from pdserve.bench.load import Outcome, Target, run_load
from pdserve.bench.own_cluster import own_cluster
from pdserve.bench.report import parse_limits, report_by_prompt_len
from pdserve.bench.serve import (
    add_target_arguments,
    add_workload_arguments,
    first_model,
    workload_of,
)
from pdserve.core.errors import ConfigError

WARM_UP = 4  # requests that do not count
SHOWN = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "good_share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench compare``."""
    parser.add_argument("cluster_yaml", nargs="?", type=Path, help="default: all defaults")
    parser.add_argument(
        "--case", action="append", nargs="+", required=True, metavar=("NAME", "KEY=VALUE")
    )
    add_target_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument("--request-rate", default="80%", help="requests/s, or a share of the first")
    parser.add_argument("--rounds", type=whole_number, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where a request failed."""
    cases = {words[0]: words[1:] for words in args.case}
    if len(cases) < len(args.case):
        raise ConfigError("--case: every case needs a name of its own")
    workload_of(args, 1.0)  # what cannot be asked is refused before a cluster starts
    rate = _rate(args, next(iter(cases.values())))
    seen: dict[str, list[list[Outcome]]] = {name: [] for name in cases}
    for number in range(args.rounds):
        for name, settings in cases.items():
            sys.stderr.write(f"round {number + 1}: {name}\n")
            seen[name].append(_measure(args, settings, rate))
    limits = parse_limits(args.goodput)
    figures = {
        name: report_by_prompt_len(runs, args.classes, limits) for name, runs in seen.items()
    }
    if args.json:
        text = json.dumps({"request_rate": rate, "cases": figures})
    else:
        text = f"{rate:.3f} requests/s\n" + "\n".join(table(figures))
    sys.stdout.write(text + "\n")
    outcomes = (outcome for runs in seen.values() for run in runs for outcome in run)
    return int(any(outcome.error for outcome in outcomes))


def table(figures: dict[str, dict[str, dict[str, object]]]) -> list[str]:
    """For each range of prompt lengths a line per case; ratios are to the first case."""
    lines = []
    first = next(iter(figures.values()))
    for bounds, reference in first.items():
        lines.append(f"prompts of {bounds} tokens: {reference['num_prompts']}")
        lines.append(f"  {'':16}" + "".join(f"{name:>24}" for name in SHOWN))
        for case, parts in figures.items():
            cells = [_cell(parts[bounds].get(name), reference.get(name)) for name in SHOWN]
            lines.append(f"  {case:16}" + "".join(f"{cell:>24}" for cell in cells))
    return lines


def _cell(value: object, reference: object) -> str:
    if not isinstance(value, float):
        return "-"
    if not isinstance(reference, float) or not reference:
        return f"{value:.2f}"
    return f"{value:.2f} ({value / reference:.2f})"


def _rate(args: argparse.Namespace, settings: Sequence[str]) -> float:
    text = args.request_rate
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"--request-rate: got {text!r}, allowed are numbers above 0, and shares")
    if not text.endswith("%"):
        return value
    outcomes = _measure(args, settings, float("inf"))
    last_s = max(outcome.end_s for outcome in outcomes)
    served = sum(outcome.error is None for outcome in outcomes)
    capacity = served / (last_s - min(outcome.sent_s for outcome in outcomes))
    sys.stderr.write(f"the first case serves {capacity:.3f} requests/s\n")
    return capacity * value / 100


def _measure(args: argparse.Namespace, settings: Sequence[str], rate: float) -> list[Outcome]:
    """One cluster, started for this and ended."""
    log = Path(tempfile.mkdtemp(prefix="pdserve-bench-")) / "serve.log"
    with own_cluster(args.cluster_yaml, settings, log) as cluster:
        target = Target(
            url=cluster.url,
            model=args.model or first_model(cluster.url),
            vocab_size=args.vocab_size,
            seed=args.seed,
            max_concurrency=args.max_concurrency,
        )
        workload = workload_of(args, rate)
        warm_up = [replace(each, arrival_s=0.0, index=-1 - each.index) for each in workload]
        asyncio.run(run_load(target, warm_up[:WARM_UP]))
        return asyncio.run(run_load(target, workload))
