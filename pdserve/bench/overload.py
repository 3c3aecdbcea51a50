"""``pdserve bench overload``: the rate a running server sustains, and what happens above it.

Capacity is the highest offered rate at which at least ``--good-share`` of the requests keep every
limit of ``--goodput``. Then ``--factor`` times that rate is offered: what is served must be nearly
as quick as at capacity, the rest be refused soon, and goodput stay.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import replace

from pdserve.bench.arguments import amount, share
from pdserve.bench.load import Outcome, run_load
from pdserve.bench.report import Limits, parse_limits, percentile, report
from pdserve.bench.serve import (
    add_target_arguments,
    add_workload_arguments,
    target_of,
    workload_of,
)
from pdserve.bench.server import add_server_arguments
from pdserve.core.errors import ConfigError

REFUSED = ("http 429", "http 408")
WARM_UP = 4  # requests that do not count
CLOSE_ENOUGH = 1.1  # the search ends when the rates around capacity are so near


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench overload``."""
    add_server_arguments(parser)
    add_target_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument("--start-rate", type=amount, default=1.0, help="requests/s tried first")
    parser.add_argument("--good-share", type=share, default=0.95, help="of a rate that holds")
    parser.add_argument("--factor", type=amount, default=3.0, help="of the capacity, then offered")
    parser.add_argument(
        "--duration", type=amount, default=60.0, help="seconds at each rate, at least"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and exit with 1 where not even a tenth of the first rate is sustained."""
    limits = parse_limits(args.goodput)
    if limits == Limits():
        raise ConfigError("--goodput: give at least one limit, such as ttft:2000")
    found = asyncio.run(_measure(args, limits))
    text = json.dumps(found) if args.json else "\n".join(f"{k:24}{v}" for k, v in found.items())
    sys.stdout.write(text + "\n")
    return 0 if found["capacity_rps"] else 1


class CapacitySearch:
    """The highest rate at which ``good_share`` of the requests are good: doubles or halves until a
    rate holds and another does not, then goes between both.
    """

    def __init__(self, start_rate: float, good_share: float) -> None:
        self.rate: float | None = start_rate  # to be tried next; None: the search is over
        self.capacity = 0.0  # the highest rate that held so far; 0: none did
        self._least_rate = start_rate / 10
        self._good_share = good_share
        self._failed: float | None = None

    def on(self, share: float) -> None:
        """The share of good requests at ``rate``."""
        assert self.rate is not None, "the search is over"
        if share >= self._good_share:
            self.capacity = self.rate
        else:
            self._failed = self.rate
        self.rate = self._next_rate()

    def _next_rate(self) -> float | None:
        held, failed = self.capacity, self._failed
        if failed is None:
            return held * 2
        if not held:
            return failed / 2 if failed > self._least_rate else None
        return (held * failed) ** 0.5 if failed / held > CLOSE_ENOUGH else None


async def _measure(args: argparse.Namespace, limits: Limits) -> dict[str, object]:
    offer = _Offer(args, limits)
    await offer.warm_up()
    seen: dict[float, list[Outcome]] = {}
    search = CapacitySearch(args.start_rate, args.good_share)
    while (rate := search.rate) is not None:
        seen[rate] = await offer(rate)
        if _share(seen[rate], limits) < args.good_share:
            seen[rate] += await offer(rate)  # one disturbed run does not end the search
        search.on(_share(seen[rate], limits))
    capacity = search.capacity
    if not capacity:
        return {"capacity_rps": 0.0}
    over = await offer(capacity * args.factor)
    return {"capacity_rps": capacity, **compare(seen[capacity], over, limits)}


class _Offer:
    """Offers the workload of ``args`` at any rate. No two runs have the same prompts: their KV is
    nowhere cached.
    """

    def __init__(self, args: argparse.Namespace, limits: Limits) -> None:
        self._args = args
        self._target = target_of(args)
        self._limits = limits
        self._num_runs = 0

    async def warm_up(self) -> None:
        await self._run(float("inf"), WARM_UP)

    async def __call__(self, rate: float) -> list[Outcome]:
        outcomes = await self._run(rate, max(20, int(rate * self._args.duration)))
        share = _share(outcomes, self._limits)
        sys.stderr.write(f"{rate:.2f} requests/s: {share:.1%} good\n")
        return outcomes

    async def _run(self, rate: float, num_prompts: int) -> list[Outcome]:
        seed = self._args.seed + self._num_runs
        self._num_runs += 1
        args = argparse.Namespace(**{**vars(self._args), "seed": seed, "num_prompts": num_prompts})
        return await run_load(replace(self._target, seed=seed), workload_of(args, rate))


def _share(outcomes: list[Outcome], limits: Limits) -> float:
    return sum(map(limits.kept, outcomes)) / len(outcomes)


def compare(at: list[Outcome], over: list[Outcome], limits: Limits) -> dict[str, object]:
    """The overloaded run beside that at capacity."""
    served = [outcome.ttft_s for outcome in over if outcome.error is None and outcome.ttft_s]
    before = [outcome.ttft_s for outcome in at if outcome.error is None and outcome.ttft_s]
    refused = [o.end_s - o.sent_s for o in over if o.error in REFUSED]
    at_report, over_report = report(at, limits), report(over, limits)
    at_goodput, over_goodput = at_report["request_goodput"], over_report["request_goodput"]
    assert isinstance(at_goodput, float)
    assert isinstance(over_goodput, float)
    return {
        "p99_ttft_ratio": percentile(served, 99) / percentile(before, 99) if served else None,
        "goodput_ratio": over_goodput / at_goodput,
        "num_refused": len(refused),
        "longest_refusal_s": max(refused, default=0.0),
        "other_errors": sum(o.error is not None and o.error not in REFUSED for o in over),
        "at_capacity": at_report,
        "overloaded": over_report,
    }
