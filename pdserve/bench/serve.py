"""``pdserve bench serve``: latency, throughput and goodput of a running OpenAI-compatible server.

The options and the names of the results are those of `vllm bench serve`, so figures of other
servers can stand beside ours. Prompts are random tokens, each request's its own; outputs have
exactly the length asked for. Goodput counts requests within every limit of ``--goodput``.
"""

import argparse
import asyncio
import json
import ssl
import sys
from pathlib import Path

import httpx

from pdserve.bench.arguments import amount, rate, whole_number, whole_numbers
from pdserve.bench.authorization import headers
from pdserve.bench.load import Target, run_load
from pdserve.bench.report import parse_limits, report, report_by_prompt_len
from pdserve.bench.routes import routes_since, routes_taken
from pdserve.bench.server import add_server_arguments, server_of
from pdserve.bench.workload import Arrival, at_rate, cut, random_workload, read_trace
from pdserve.core.errors import ConfigError

LOOKUP_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench serve``."""
    add_server_arguments(parser)
    add_target_arguments(parser)
    add_workload_arguments(parser)
    parser.add_argument(
        "--request-rate", type=rate, default=float("inf"), help="requests/s; default: all at once"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """How a server is asked, and what counts as good."""
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument(
        "--vocab-size", type=whole_number, default=10_000, help="prompts' tokens, below"
    )
    parser.add_argument(
        "--max-concurrency", type=whole_number, help="requests on their way at once"
    )
    parser.add_argument(
        "--goodput", nargs="*", default=[], metavar="NAME:MS", help="ttft:200 tpot:50 e2el:5000"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked."""
    parser.add_argument(
        "--dataset-name",
        choices=("random", "trace"),
        default="random",
        help="where prompts come from",
    )
    parser.add_argument(
        "--dataset-path", type=Path, help="of a trace: Azure's CSV, Mooncake's JSON"
    )
    parser.add_argument("--num-prompts", type=whole_number, default=100, help="requests")
    parser.add_argument(
        "--random-input-len", type=_bounds, default="128", metavar="N[:N]", help="tokens"
    )
    parser.add_argument(
        "--random-output-len", type=_bounds, default="64", metavar="N[:N]", help="tokens"
    )
    parser.add_argument("--burstiness", type=amount, default=1.0, help="1: Poisson; less: burstier")
    parser.add_argument(
        "--max-input-len", type=whole_number, default=4096, help="a trace's are cut to it"
    )
    parser.add_argument("--max-output-len", type=whole_number, default=1024, help="likewise")
    parser.add_argument(
        "--classes", type=_classes, default=(), metavar="N,…", help="report by prompt length too"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exit status 1 where no request was answered."""
    limits = parse_limits(args.goodput)
    target = target_of(args)
    before = routes_taken(target.url, target.verify)
    outcomes = asyncio.run(run_load(target, workload_of(args, args.request_rate)))
    results = report(outcomes, limits)
    if routes := routes_since(before, routes_taken(target.url, target.verify)):
        results["routes"] = routes
    if args.classes:
        results["by_prompt_len"] = report_by_prompt_len([outcomes], args.classes, limits)
    sys.stdout.write((json.dumps(results) if args.json else table(results)) + "\n")
    return 0 if results["completed"] else 1


def target_of(args: argparse.Namespace) -> Target:
    """Asks the server for its model's name where none was given. Raises ConfigError, also for what
    is no address.
    """
    server = server_of(args)
    return Target(
        url=server.url,
        verify=server.verify,
        model=args.model or first_model(server.url, server.verify),
        vocab_size=args.vocab_size,
        seed=args.seed,
        max_concurrency=args.max_concurrency,
    )


def workload_of(args: argparse.Namespace, rate: float) -> list[Arrival]:
    """``--num-prompts`` requests at that mean rate."""
    if args.dataset_name == "random":
        if args.dataset_path is not None:
            raise ConfigError(
                f"--dataset-path: got {args.dataset_path}, but --dataset-name is random; a file "
                "needs --dataset-name trace"
            )
        return random_workload(
            num_requests=args.num_prompts,
            prompt_lens=args.random_input_len,
            output_lens=args.random_output_len,
            rate=rate,
            burstiness=args.burstiness,
            seed=args.seed,
        )
    if args.dataset_path is None:
        raise ConfigError("--dataset-path: a trace needs its file")
    rows = read_trace(args.dataset_path)[: args.num_prompts]
    rows = cut(rows, max_prompt_len=args.max_input_len, max_output_len=args.max_output_len)
    return rows if rate == float("inf") else at_rate(rows, rate)


def table(results: dict[str, object]) -> str:
    """One line for each figure."""
    lines = []
    for name, value in results.items():
        if isinstance(value, dict) and name == "by_prompt_len":
            for bounds, part in value.items():
                lines.append(f"prompts of {bounds} tokens")
                lines += [f"  {line}" for line in table(part).splitlines()]
        else:
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
            lines.append(f"{name:24}{text:>14}")
    return "\n".join(lines)


def first_model(url: str, verify: ssl.SSLContext | bool = True) -> str:
    """The name of the first model that the server lists. Raises ConfigError."""
    try:
        reply = httpx.get(
            f"{url}/v1/models",
            headers=headers(),
            timeout=LOOKUP_TIMEOUT_S,
            trust_env=False,
            verify=verify,
        )
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(
            f"--base-url: {url} does not list its models: {error}{_hint(error)}"
        ) from error


def _hint(error: Exception) -> str:
    return "; give its CA by --ca, a PEM file" if "CERTIFICATE_VERIFY_FAILED" in str(error) else ""


def _bounds(text: str) -> tuple[int, int]:
    """``"128"`` or ``"100:200"``."""
    low, _, high = text.partition(":")
    bounds = whole_number(low), whole_number(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} does not ascend")
    return bounds


def _classes(text: str) -> tuple[int, ...]:
    bounds = whole_numbers(text)
    if sorted(set(bounds)) != list(bounds):
        raise argparse.ArgumentTypeError(f"{text!r} does not ascend")
    return bounds
