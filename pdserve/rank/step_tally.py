"""How many steps a node ran, of which kind, how long they took and how many tokens they had.

A chunk of one token counts as a decode, a longer one as a piece of a prompt.
"""

from collections import Counter
from collections.abc import Iterator

from pdserve.engine.batch import Batch
from pdserve.telemetry.exposition import Histogram, Labels, family, histogram_family

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
KINDS = ("prefill", "decode", "mixed")


class StepTally:
    """Fed with each step."""

    def __init__(self) -> None:
        self._durations = {kind: Histogram(BOUNDS_S) for kind in KINDS}
        self._tokens: Counter[str] = Counter(prompt=0, decode=0)
        self._device_s: dict[str, float] = {}  # by kind; empty where it is not measured

    def observe(self, batch: Batch, duration_s: float, device_s: float | None) -> None:
        lengths = [chunk.length for chunk in batch.chunks]
        num_decodes = lengths.count(1)
        self._tokens["decode"] += num_decodes
        self._tokens["prompt"] += sum(lengths) - num_decodes
        if lengths:
            both = "mixed" if 0 < num_decodes < len(lengths) else "decode"
            kind = both if num_decodes else "prefill"
            self._durations[kind].observe(duration_s)
            if device_s is not None:
                self._device_s[kind] = self._device_s.get(kind, 0.0) + device_s

    def lines(self, labels: Labels) -> Iterator[str]:
        """In Prometheus' text format."""
        yield from histogram_family(
            "node_step_duration_seconds",
            "Steps of the node's ranks, from when these were free to their output.",
            [({**labels, "kind": kind}, times) for kind, times in self._durations.items()],
        )
        if self._device_s:
            yield from family(
                "node_step_device_seconds_total",
                "counter",
                "Time of rank 0's GPU that steps took; the rest of their durations it was idle.",
                [({**labels, "kind": kind}, device_s) for kind, device_s in self._device_s.items()],
            )
        yield from family(
            "node_step_tokens_total",
            "counter",
            "Tokens that steps computed: of prompts, and decoded.",
            [({**labels, "kind": kind}, count) for kind, count in self._tokens.items()],
        )
