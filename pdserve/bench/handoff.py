"""``pdserve bench handoff``: what a running server's hand-overs cost, by prompt length.

Prompts of random tokens, one after the other: first on an idle server, then beside ``--load``
requests that decode. Each answer's timeline says how long the prompt's KV took once its first token
was known (``transfer``), how long the sequence then waited for a step (``decode_queue``), and that
step (``first_decode``); ``handoff`` is the first two. All three are times of the decode node's
clock. Answers that took another route are counted, not measured.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from pdserve.bench.arguments import whole_number, whole_numbers
from pdserve.bench.authorization import headers
from pdserve.bench.serve import first_model
from pdserve.bench.server import Server, add_server_arguments, server_of
from pdserve.bench.workload import Arrival, prompt_ids
from pdserve.core.errors import ConfigError
from pdserve.core.request import RouteTaken

TIMEOUT_S = 600.0
STAGES = ("transfer", "decode_queue", "first_decode")
WARM_ROUNDS = 2
FIRST_OF_LOAD = 1 << 20  # numbers of its prompts, apart from those that are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt length, idle or not: medians in milliseconds. None: no answer took that route."""

    tokens: int
    load: int  # requests that decode meanwhile
    handed_over: int  # answers that are in the figures
    others: int
    transport: str | None
    mib: float | None
    transfer_ms: float | None
    decode_queue_ms: float | None
    first_decode_ms: float | None
    handoff_ms: float | None
    handoff_p90_ms: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pdserve bench handoff``."""
    add_server_arguments(parser)
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument(
        "--vocab-size", type=whole_number, default=10_000, help="prompts' tokens, below"
    )
    parser.add_argument("--prompt-lens", type=whole_numbers, default="128,512,2048", help="tokens")
    parser.add_argument("--rounds", type=whole_number, default=20, help="medians of so many")
    parser.add_argument("--load", type=whole_number, default=8, help="requests that decode")
    parser.add_argument("--load-tokens", type=whole_number, default=512, help="of each of them")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 where nothing was handed over. Raises ConfigError."""
    if not args.prompt_lens:
        raise ConfigError("--prompt-lens: got none")
    server = server_of(args)
    model = args.model or first_model(server.url, server.verify)
    asking = Asking(server, model, args.vocab_size, args.seed)
    rows = asyncio.run(_measure_all(asking, args))
    if args.json:
        sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n")
    return 0 if any(row.handed_over for row in rows) else 1


class Asking:
    """How the server is asked; prompts are numbered, each has tokens of its own."""

    def __init__(self, server: Server, model: str, vocab_size: int, seed: int) -> None:
        self.server = server
        self._model = model
        self._vocab_size = vocab_size
        self._seed = seed
        self._next = 0

    async def timeline(self, client: httpx.AsyncClient, prompt_len: int) -> dict[str, Any]:
        """One answer's timeline. Raises ConfigError where there is none."""
        self._next += 1
        body = self._body(self._next, prompt_len, 2) | {"timeline": True}
        reply = await client.post("/v1/completions", json=body)
        try:
            found: dict[str, Any] = reply.raise_for_status().json()["timeline"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ConfigError(
                f"--base-url: {self.server.url} gave no timeline: {error!r}"
            ) from error
        return found

    async def keep_decoding(self, client: httpx.AsyncClient, number: int, num_tokens: int) -> None:
        """Short prompts with long answers, until it is cancelled."""
        while True:
            number += 1
            await client.post("/v1/completions", json=self._body(number, 16, num_tokens))

    def _body(self, number: int, prompt_len: int, num_tokens: int) -> dict[str, Any]:
        arrival = Arrival(index=number, arrival_s=0.0, prompt_len=prompt_len, output_len=num_tokens)
        return {
            "model": self._model,
            "prompt": prompt_ids(arrival, seed=self._seed, vocab_size=self._vocab_size),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def row_of(prompt_len: int, load: int, timelines: Sequence[dict[str, Any]]) -> Row:
    """The medians of those that were handed over."""
    handed = [t for t in timelines if t["route"] == RouteTaken.DISAGGREGATED]
    times = {name: [_stage_ms(timeline, name) for timeline in handed] for name in STAGES}
    sums = sorted(map(sum, zip(times["transfer"], times["decode_queue"], strict=True)))
    return Row(
        tokens=prompt_len,
        load=load,
        handed_over=len(handed),
        others=len(timelines) - len(handed),
        transport=handed[0]["transport"] if handed else None,
        mib=round(handed[0]["kv_bytes"] / (1 << 20), 2) if handed else None,
        transfer_ms=_median(times["transfer"]),
        decode_queue_ms=_median(times["decode_queue"]),
        first_decode_ms=_median(times["first_decode"]),
        handoff_ms=_median(sums),
        handoff_p90_ms=round(sums[int(0.9 * len(sums))], 3) if sums else None,
    )


async def _measure_all(asking: Asking, args: argparse.Namespace) -> list[Row]:
    out = sys.stderr if args.json else sys.stdout
    print(HEADER, file=out, flush=True)
    rows = []
    async with httpx.AsyncClient(
        base_url=asking.server.url,
        headers=headers(),
        timeout=TIMEOUT_S,
        trust_env=False,
        verify=asking.server.verify,
    ) as client:
        for load in (0, args.load):
            async with _load(asking, client, load, args.load_tokens):
                for prompt_len in args.prompt_lens:
                    asked = WARM_ROUNDS + args.rounds
                    found = [await asking.timeline(client, prompt_len) for _ in range(asked)]
                    rows.append(row_of(prompt_len, load, found[WARM_ROUNDS:]))
                    print(_line(rows[-1]), file=out, flush=True)
    return rows


@asynccontextmanager
async def _load(
    asking: Asking, client: httpx.AsyncClient, size: int, num_tokens: int
) -> AsyncIterator[None]:
    """So many requests that decode inside the block."""
    tasks = [
        asyncio.create_task(asking.keep_decoding(client, FIRST_OF_LOAD * (1 + index), num_tokens))
        for index in range(size)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await task


HEADER = (
    f"{'tokens':>8}{'load':>6}{'MiB':>9}{'transfer':>10}{'queue':>8}{'step':>8}"
    f"{'handoff':>9}{'p90':>8}  ms, of answers"
)


def _line(row: Row) -> str:
    figures = (
        (row.mib, 9),
        (row.transfer_ms, 10),
        (row.decode_queue_ms, 8),
        (row.first_decode_ms, 8),
        (row.handoff_ms, 9),
        (row.handoff_p90_ms, 8),
    )
    text = "".join("-".rjust(size) if x is None else f"{x:>{size}.2f}" for x, size in figures)
    others = f", {row.others} otherwise" if row.others else ""
    by = f" by {row.transport}" if row.transport else ""
    return f"{row.tokens:>8}{row.load:>6}{text}  {row.handed_over}{by}{others}"


def _stage_ms(timeline: dict[str, Any], name: str) -> float:
    return float(
        sum(1e3 * stage["duration_s"] for stage in timeline["stages"] if stage["name"] == name)
    )


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
