"""``pdserve bench structured``: JSON-schema requests to a server, and what a grammar costs.

Three parts: ``--num-requests`` requests, each with a schema of its own, whose answers must all
parse and validate; the time to the first token with a new grammar, a known one and none, in turn;
and, without a server, what masks cost of a decode step. Without ``--base-url`` a cluster is started
for it (``--set`` changes it), and ended after. Exits with 1 where an answer is wrong.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pdserve.bench.arguments import whole_number
from pdserve.bench.engine import BLOCK_SIZE
from pdserve.bench.engine_runner import Runner
from pdserve.bench.own_cluster import own_cluster
from pdserve.bench.serve import first_model
from pdserve.bench.server import Server, add_ca_argument, named_server
from pdserve.bench.structured.costs import NUM_STEPS, PROMPT_LEN, GrammarCosts, measure
from pdserve.bench.structured.requests import Answer, FirstTokens, ask_all, first_tokens
from pdserve.core.model_spec import ModelSpec, read_model_spec
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.parallel import SoloGroup
from pdserve.models.fetch import locate

SHOWN_PROBLEMS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench structured``."""
    parser.add_argument("--base-url", help="a running server; default: start a cluster")
    add_ca_argument(parser)
    parser.add_argument("--cluster", type=Path, help="its cluster file; default: all defaults")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="for the costs")
    parser.add_argument("--num-requests", type=whole_number, default=200, help="each with a schema")
    parser.add_argument("--max-concurrency", type=whole_number, default=8, help="at once")
    parser.add_argument("--rounds", type=whole_number, default=20, help="of each cost")
    parser.add_argument("--threads", type=whole_number, help="CPU threads of a step")
    parser.add_argument("--seed", type=int, default=0, help="of the schemas")
    parser.add_argument("--skip-serving", action="store_true", help="only the costs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 where every answer was right."""
    found: dict[str, object] = {}
    wrong: list[Answer] = []
    if not args.skip_serving:
        answers, first = _served(args)
        wrong = [answer for answer in answers if answer.problem is not None]
        found |= _serving_figures(answers, wrong, first)
    found |= _cost_figures(_costs(args))
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("".join(f"{name:28}{value}\n" for name, value in found.items()))
    for answer in wrong[:SHOWN_PROBLEMS]:
        sys.stderr.write(f"wrong: {answer.problem}: {answer.text[:200]!r}\n")
    return 1 if wrong else 0


def _served(args: argparse.Namespace) -> tuple[list[Answer], FirstTokens]:
    if args.base_url is not None:
        return asyncio.run(_ask(args, named_server(args.base_url, args.ca)))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with own_cluster(args.cluster, args.set, log) as cluster:
            return asyncio.run(_ask(args, named_server(cluster.url, None)))


async def _ask(args: argparse.Namespace, server: Server) -> tuple[list[Answer], FirstTokens]:
    model = first_model(server.url, server.verify)
    answers = await ask_all(
        server, model, num=args.num_requests, at_once=args.max_concurrency, seed=args.seed
    )
    first = await first_tokens(server, model, rounds=args.rounds, seed=args.seed + 1)
    return answers, first


def _costs(args: argparse.Namespace) -> GrammarCosts:
    directory = locate(args.model)
    spec = read_model_spec(directory)
    runner = Runner(_config(directory, spec, args.threads), SoloGroup(), in_flight=1)
    runner.warm_up()
    return measure(directory, spec, runner, rounds=args.rounds, seed=args.seed)


def _config(directory: Path, spec: ModelSpec, threads: int | None) -> EngineConfig:
    """One sequence on the CPU, as the default cluster's nodes compute it."""
    longest = PROMPT_LEN + NUM_STEPS + 2
    settings = EngineConfig(
        model_dir=directory,
        spec=spec,
        load_format="auto",
        device="cpu",
        dtype="float32",
        tp_size=1,
        tp_rank=0,
        block_size=BLOCK_SIZE,
        kv_dtype="float32",
        kv_cache_bytes=0,
        max_num_seqs=1,
        max_num_batched_tokens=longest,
        max_model_len=longest,
        num_threads=threads or torch.get_num_threads(),
    )
    layout = settings.layout
    num_bytes = (layout.num_blocks_for(longest) + 1) * layout.block_stride_bytes
    return replace(settings, kv_cache_bytes=num_bytes)


def _serving_figures(
    answers: list[Answer], wrong: list[Answer], first: FirstTokens
) -> dict[str, object]:
    tokens = sorted(answer.num_tokens for answer in answers)
    return {
        "requests": len(answers),
        "wrong": len(wrong),
        "median_output_tokens": tokens[len(tokens) // 2],
        "ttft_plain_ms": round(first.plain_s * 1e3, 1),
        "ttft_new_grammar_ms": round(first.new_grammar_s * 1e3, 1),
        "ttft_known_grammar_ms": round(first.known_grammar_s * 1e3, 1),
    }


def _cost_figures(costs: GrammarCosts) -> dict[str, object]:
    figures = {name: round(value, 3) for name, value in asdict(costs).items()}
    return {**figures, "share_of_step": f"{costs.share_of_step:.2%}"}
