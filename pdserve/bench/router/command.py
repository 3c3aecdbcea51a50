"""``pdserve bench router``: what one router process adds and how much it streams, on one core.

A fake decode node, the router and the load each run in a process of their own; where the machine
has two cores the router has one to itself. Two questions:

- added first token: a prompt of 128 tokens over HTTP, against the node's own session.
- streaming: 256 clients stream text; the node gives each of them a token a step. A row for each
  ``--step-ms`` (0: as fast as the router reads). A router that falls behind gives several tokens in
  one event: ``tokens/event`` says so, ``tokens/CPU s`` is what a whole core would do. With
  ``--whole`` they ask for whole answers, each of which counts as one event.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass

import uvloop

from pdserve.bench.arguments import amount, amounts, whole_number
from pdserve.bench.router.first_token import FirstTokens, first_tokens
from pdserve.bench.router.processes import Running, Setup, pin, running
from pdserve.bench.router.streams import MAX_PATTERN, Asked, Streamed, connect, count
from pdserve.core.errors import ConfigError
from pdserve.models.fetch import locate
from pdserve.text.tokenizer import Tokenizer

PROMPT_LEN = 128
TOKEN_TEXT = " the"
MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRow:
    """Medians of the time to the first token, in milliseconds."""

    requests: int
    routed_ms: float
    direct_ms: float
    added_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """One rate of the node. ``offered``: tokens a second that it gives; None: all that is taken."""

    streams: int
    step_ms: float
    offered: float | None
    tokens_per_s: float
    tokens_per_event: float
    router_cpu: float  # cores
    tokens_per_cpu_s: float
    rss_before_mib: float
    rss_after_mib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench router``."""
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="for its tokenizer: a name or a directory"
    )
    parser.add_argument("--streams", type=whole_number, default=256)
    parser.add_argument("--step-ms", type=amounts, default=(20.0, 10.0, 5.0), metavar="MS,…")
    parser.add_argument(
        "--max-tokens", type=whole_number, default=512, help="of one streamed answer"
    )
    parser.add_argument("--duration-s", type=amount, default=10.0, help="of each row")
    parser.add_argument("--warm-s", type=amount, default=3.0, help="streaming before each row")
    parser.add_argument("--requests", type=whole_number, default=200, help="for the first token")
    parser.add_argument(
        "--whole", action="store_true", help="clients ask for whole answers in place of streams"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; with ``--json`` the table goes to stderr. Raises ConfigError."""
    bench = _Bench(args)
    out = sys.stderr if args.json else sys.stdout
    added = bench.added()
    print(
        f"first token, {PROMPT_LEN} prompt tokens, medians of {added.requests}: "
        f"{added.routed_ms:.2f} ms routed, {added.direct_ms:.2f} ms direct, "
        f"{added.added_ms:.2f} ms added",
        file=out,
        flush=True,
    )
    print(HEADER, file=out, flush=True)
    rows = []
    for step_ms in args.step_ms:
        rows.append(bench.streaming(step_ms))
        print(row(rows[-1]), file=out, flush=True)
    if args.json:
        result = {"first_token": asdict(added), "streaming": [asdict(item) for item in rows]}
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


HEADER = (
    f"{'streams':>8}{'step ms':>9}{'offered/s':>11}{'tokens/s':>10}{'tokens/event':>14}"
    f"{'router CPU':>12}{'tokens/CPU s':>14}{'RSS MiB':>16}"
)


def row(item: StreamRow) -> str:
    """One rate in the columns of ``HEADER``."""
    offered = "all" if item.offered is None else f"{item.offered:,.0f}"
    rss = f"{item.rss_before_mib:.1f} → {item.rss_after_mib:.1f}"
    return (
        f"{item.streams:>8}{item.step_ms:>9g}{offered:>11}{item.tokens_per_s:>10,.0f}"
        f"{item.tokens_per_event:>14.2f}{item.router_cpu:>12.2f}"
        f"{item.tokens_per_cpu_s:>14,.0f}{rss:>16}"
    )


class _Bench:
    """Starts what is measured anew for each row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model_dir = locate(args.model)
        tokenizer = Tokenizer(self._model_dir)
        self._token_ids = tokenizer.encode(TOKEN_TEXT, add_special_tokens=False)
        if len(self._token_ids) != 1 or len(TOKEN_TEXT) > MAX_PATTERN:
            raise ConfigError(f"--model: its tokenizer has no token of its own for {TOKEN_TEXT!r}")
        cores: list[int | None] = [*sorted(os.sched_getaffinity(0))]
        self._router_core = cores[-2] if len(cores) > 1 else None
        self._other_core = cores[-1] if len(cores) > 1 else None
        pin(self._other_core)

    def added(self) -> AddedRow:
        with running(self._setup(step_ms=0.0)) as processes:
            asked = self._asked(processes, max_tokens=1, stream=True)
            prompt_ids = self._token_ids * PROMPT_LEN
            times = uvloop.run(first_tokens(asked, processes.node, prompt_ids, self._args.requests))
        return _added(times)

    def streaming(self, step_ms: float) -> StreamRow:
        with running(self._setup(step_ms)) as processes:
            return uvloop.run(self._stream(processes, step_ms))

    async def _stream(self, processes: Running, step_ms: float) -> StreamRow:
        args = self._args
        clients, counts = await connect(
            self._asked(processes, max_tokens=args.max_tokens, stream=not args.whole), args.streams
        )
        await count(clients, counts, args.warm_s)
        rss_before_mib, cpu_before_s = processes.router_rss_mib(), processes.router_cpu_s()
        streamed = await count(clients, counts, args.duration_s)
        cpu_s = processes.router_cpu_s() - cpu_before_s
        rss_after_mib = processes.router_rss_mib()
        for client in clients:
            client.close()
        return _stream_row(args.streams, step_ms, streamed, cpu_s, rss_before_mib, rss_after_mib)

    def _setup(self, step_ms: float) -> Setup:
        return Setup(
            model_dir=self._model_dir,
            token_id=self._token_ids[0],
            step_s=step_ms / MILLISECONDS,
            router_core=self._router_core,
            other_core=self._other_core,
        )

    def _asked(self, processes: Running, *, max_tokens: int, stream: bool) -> Asked:
        host, _, port = processes.http_address.rpartition(":")
        return Asked(
            host=host,
            port=int(port),
            prompt=TOKEN_TEXT * PROMPT_LEN,
            max_tokens=max_tokens,
            token_text=TOKEN_TEXT,
            stream=stream,
        )


def _added(times: FirstTokens) -> AddedRow:
    routed_ms = statistics.median(times.routed_s) * MILLISECONDS
    direct_ms = statistics.median(times.direct_s) * MILLISECONDS
    return AddedRow(
        requests=len(times.routed_s),
        routed_ms=routed_ms,
        direct_ms=direct_ms,
        added_ms=routed_ms - direct_ms,
    )


def _stream_row(
    streams: int,
    step_ms: float,
    streamed: Streamed,
    cpu_s: float,
    rss_before_mib: float,
    rss_after_mib: float,
) -> StreamRow:
    return StreamRow(
        streams=streams,
        step_ms=step_ms,
        offered=streams * MILLISECONDS / step_ms if step_ms else None,
        tokens_per_s=streamed.tokens / streamed.duration_s,
        tokens_per_event=streamed.tokens / max(streamed.events, 1),
        router_cpu=cpu_s / streamed.duration_s,
        tokens_per_cpu_s=streamed.tokens / max(cpu_s, 1e-9),
        rss_before_mib=rss_before_mib,
        rss_after_mib=rss_after_mib,
    )
