"""What is asked of a server, and when: prompt and output lengths with their arrival times.

Made at random or read from a trace, then stretched to a rate and cut to what the server holds.
Everything follows from the seed. Knows no server and no clock.
"""

import csv
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pdserve.core.errors import ConfigError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request: ``arrival_s`` counts from the start of the run."""

    index: int
    arrival_s: float
    prompt_len: int
    output_len: int


def random_workload(
    *,
    num_requests: int,
    prompt_lens: tuple[int, int],
    output_lens: tuple[int, int],
    rate: float,
    burstiness: float,
    seed: int,
) -> list[Arrival]:
    """Lengths uniform between both bounds, each included; gaps as ``arrival_times`` draws them."""
    draw = random.Random(seed)
    times = arrival_times(num_requests, rate=rate, burstiness=burstiness, seed=seed)
    return [
        Arrival(
            index=index,
            arrival_s=time_s,
            prompt_len=draw.randint(*prompt_lens),
            output_len=draw.randint(*output_lens),
        )
        for index, time_s in enumerate(times)
    ]


def arrival_times(num_requests: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from 0 on. Gaps are gamma distributed with shape ``burstiness`` and mean 1 / rate:
    1 is a Poisson process, less is burstier. An infinite rate has all arrive at once.
    """
    if rate == float("inf"):
        return [0.0] * num_requests
    draw = random.Random(seed)
    gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num_requests))
    return [0.0, *itertools.accumulate(gaps)][:num_requests]


def read_trace(path: Path) -> list[Arrival]:
    """A trace with the columns of Azure's LLM inference traces (CSV) or Mooncake's (JSON lines).

    Raises ConfigError naming the file and what is wrong with it.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(_mooncake(lines) if path.suffix == ".jsonl" else _azure(csv.reader(lines)))
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"trace {path}: not a CSV of {', '.join(AZURE_COLUMNS)} nor JSON lines with "
            f"{', '.join(MOONCAKE_KEYS)}: {error}"
        ) from error
    rows.sort(key=lambda row: row[0])
    return [
        Arrival(index=i, arrival_s=time_s - rows[0][0], prompt_len=prompt, output_len=output)
        for i, (time_s, prompt, output) in enumerate(rows)
    ]


def at_rate(workload: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same arrivals, their time stretched so that the mean rate is ``rate`` requests/s."""
    if len(workload) < 2:  # noqa: PLR2004
        return list(workload)
    factor = (len(workload) - 1) / rate / workload[-1].arrival_s
    return [replace(each, arrival_s=each.arrival_s * factor) for each in workload]


def cut(workload: Iterable[Arrival], *, max_prompt_len: int, max_output_len: int) -> list[Arrival]:
    """No length above its bound, none below 1."""
    return [
        replace(
            each,
            prompt_len=max(1, min(each.prompt_len, max_prompt_len)),
            output_len=max(1, min(each.output_len, max_output_len)),
        )
        for each in workload
    ]


def prompt_ids(arrival: Arrival, *, seed: int, vocab_size: int) -> list[int]:
    """Tokens that no other request of the run begins with."""
    draw = random.Random(f"{seed}/{arrival.index}")
    return draw.choices(range(vocab_size), k=arrival.prompt_len)


def _azure(rows: Iterable[list[str]]) -> Iterable[tuple[float, int, int]]:
    header, *records = rows
    columns = [header.index(name) for name in AZURE_COLUMNS]
    for record in records:
        time, prompt, output = (record[column] for column in columns)
        # Seven digits of a second are one more than Python reads.
        yield datetime.fromisoformat(time[:26]).timestamp(), int(prompt), int(output)


def _mooncake(lines: Iterable[str]) -> Iterable[tuple[float, int, int]]:
    for line in lines:
        record = json.loads(line)
        time_ms, prompt, output = (record[key] for key in MOONCAKE_KEYS)
        yield float(time_ms) / 1e3, int(prompt), int(output)
