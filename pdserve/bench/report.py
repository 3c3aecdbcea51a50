"""What a run of load says: latencies, throughput and goodput, under the names that
`vllm bench serve` gives them.

Pure. Goodput counts requests that were answered whole within every limit given.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pdserve.bench.load import Outcome
from pdserve.core.errors import ConfigError

T = TypeVar("T")

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to count as good; None: anything."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            return False
        seen = (outcome.ttft_s, outcome.tpot_s, outcome.end_s - outcome.sent_s)
        allowed = (self.ttft_ms, self.tpot_ms, self.e2el_ms)
        return all(
            limit_ms is None or value_s is None or value_s * 1e3 <= limit_ms
            for value_s, limit_ms in zip(seen, allowed, strict=True)
        )


def parse_limits(words: Iterable[str]) -> Limits:
    """``["ttft:200", "tpot:50"]``, milliseconds. Raises ConfigError."""
    given: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            given[f"{name}_ms"] = float(value)
        except ValueError:
            given = {}
        if name not in LIMITS or not given.get(f"{name}_ms", 0) > 0:
            raise ConfigError(
                f"--goodput: got {word!r}, allowed are NAME:MS of {', '.join(LIMITS)}"
            )
    return Limits(**given)


def report(
    outcomes: Sequence[Outcome], limits: Limits, *, window_s: float | None = None
) -> dict[str, object]:
    """Times in milliseconds, rates per second of ``window_s``.

    That is how long the whole run took, which a part of its outcomes does not tell: None, it is all
    of them, and it took from first sending to last end.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    good = sum(map(limits.kept, outcomes))
    duration_s = run_s(outcomes) if window_s is None else window_s
    result: dict[str, object] = {
        "duration": duration_s,
        "num_prompts": len(outcomes),
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "total_input_tokens": sum(outcome.arrival.prompt_len for outcome in done),
        "total_output_tokens": sum(outcome.num_tokens for outcome in done),
        "request_throughput": len(done) / duration_s,
        "output_throughput": sum(outcome.num_tokens for outcome in done) / duration_s,
        "request_goodput": good / duration_s,
        "good_share": good / len(outcomes) if outcomes else 0.0,
    }
    for name, values_s in _latencies(done).items():
        result |= _summary(name, values_s)
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks. ``values`` are not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def by_prompt_len(
    outcomes: Sequence[Outcome], bounds: Sequence[int], summarise: Callable[[list[Outcome]], T]
) -> dict[str, T]:
    """``summarise`` of the requests whose prompts lie between neighbouring bounds."""
    edges = [0, *bounds, None]
    parts = {}
    for low, high in itertools.pairwise(edges):
        inside = [
            outcome
            for outcome in outcomes
            if (low or 0) <= outcome.arrival.prompt_len
            and (high is None or outcome.arrival.prompt_len < high)
        ]
        parts[f"{low}-{'' if high is None else high}"] = summarise(inside)
    return parts


def report_by_prompt_len(
    runs: Sequence[Sequence[Outcome]], bounds: Sequence[int], limits: Limits
) -> dict[str, dict[str, object]]:
    """Of all runs together. Rates are over all the time that they took, in each part alike, so that
    those of the parts add up to the rate of all.
    """
    window_s = sum(map(run_s, runs))
    outcomes = list(itertools.chain.from_iterable(runs))
    return by_prompt_len(outcomes, bounds, lambda part: report(part, limits, window_s=window_s))


def run_s(outcomes: Sequence[Outcome]) -> float:
    """How long a run took: from first sending to last end."""
    if not outcomes:
        return 1.0
    first = min(outcome.sent_s for outcome in outcomes)
    return max(max(outcome.end_s for outcome in outcomes) - first, 1e-9)


def _latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    gaps = [
        later - earlier
        for outcome in done
        for earlier, later in itertools.pairwise(outcome.token_times_s)
    ]
    return {
        "ttft": [outcome.ttft_s for outcome in done if outcome.ttft_s is not None],
        "tpot": [outcome.tpot_s for outcome in done if outcome.tpot_s is not None],
        "itl": gaps,
        "e2el": [outcome.end_s - outcome.sent_s for outcome in done],
    }


def _summary(name: str, values_s: Sequence[float]) -> dict[str, object]:
    if not values_s:
        return {}
    summary: dict[str, object] = {f"mean_{name}_ms": sum(values_s) / len(values_s) * 1e3}
    for percent in PERCENTILES:
        key = "median" if percent == 50 else f"p{percent}"  # noqa: PLR2004
        summary[f"{key}_{name}_ms"] = percentile(values_s, percent) * 1e3
    return summary
